"""Impossible combinations and the sentence of each."""

from dataclasses import replace

import pytest

from ssscale.config import change, load_config
from ssscale.config.choices import Compile
from ssscale.config.registry import MIXERS, POSITIONS
from ssscale.errors import UserError
from ssscale.train.estimate import memory_per_gpu
from ssscale.validate import validate
from ssscale.validate_graphs import records_blocks


def refusal(name, *overrides, world_size=None, gpu=False):
    config = load_config([f"config={name}", *overrides])
    with pytest.raises(UserError) as error:
        validate(config, world_size, gpu)
    text = str(error.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["model.num_heads=7"], "num_heads=7 does not divide model.hidden_size=128: use 1, 2, 4, 8, 16 or 32 heads"),
        (["model.num_kv_heads=3"], "num_kv_heads=3 does not divide model.num_heads=4: use 1, 2 or 4 key/value"),
        (["model.mixers=[softmax]", "model.position.method=rope", "model.head_dim=33"], "set an even model.head_dim"),
        (["model.position.method=rope"], "method=rope does not go with model.mixers=[stickbreaking]: use nope"),
        (["model.position.method=fire"], "model.mixers=[stickbreaking]: use nope; it takes the nearest keys first"),
        (["model.position.window=64"], "model.position.window=64 does not go with model.mixers=[stickbreaking]"),
        (["model.position.rope.scaling=ntk"], "model.position.rope.scaling needs model.position.method=rope, not nope"),
        (["model.position.window=0"], "model.position.window must be at least 1, not 0"),
        (["model.mixer.ssmax.variant=bias"], "ssmax.variant=bias has no effect: model.mixers=[stickbreaking] has no ssmax"),
        (["model.mixer.ssmax.bias=0.5"], "model.mixer.ssmax.bias=0.5 has no effect: model.mixers=[stickbreaking] has"),
        (["model.mixers=[softmax]", "model.mixer.stickbreaking.remainder=true"], "remainder=true has no effect"),
        (["model.num_layers=0"], "model.num_layers must be at least 1, not 0"),
        (["model.num_heads=-4"], "model.num_heads must be at least 1, not -4"),
        (["model.num_kv_heads=0"], "model.num_kv_heads must be at least 1, not 0"),
        (["model.mixer.stickbreaking.skip_below=1"], "model.mixer.stickbreaking.skip_below must be less than 1, not 1.0"),
        (["optimizer.adamw.betas=[0.9,1]"], "optimizer.adamw.betas must be less than 1, not 1.0"),
        (["train.batch_size=0"], "train.batch_size must be at least 1, not 0"),
        (["parallel.zero_stage=4"], "parallel.zero_stage must be at most 3, not 4"),
        (["train.stages=[]"], "train.stages is empty"),
        (["train.stages.1.name=stable"], "train.stages.1.name: two stages are called 'stable'"),
        (["train.stages.0.tokens=0"], "train.stages.0.tokens must be at least 1, not 0"),
        (["train.stages.0.tokens=1000"], "tokens=1,000 is less than one step, which trains 8,192 tokens"),
        (["train.stages.0.schedule.lr=0"], "train.stages.0.schedule.lr must be greater than 0, not 0.0"),
        (["train.stages.1.schedule.floor=1"], "train.stages.1.schedule.floor must be less than 1, not 1.0"),
        (["train.stages.1.mix.code=0"], "train.stages.1.mix.code must be greater than 0, not 0; leave it out"),
        (["train.stages.1.mix={}"], "train.stages.1.mix is empty"),
        (["train.stages.0.schedule.kind=decay"], "the first stage has none: put a stage before it"),
        (["train.stages.1.schedule.decay_tokens=5"], "a decay stage lowers the rate over all its tokens"),
        (["train.stages.0.schedule.floor=0.1"], "floor=0.1 has no effect under constant: set it to its default, 0.0"),
        (["train.stages.1.schedule.power_a=3"], "1.schedule.power_a=3.0 has no effect under decay"),
        (["train.stages.1.schedule.lr=0.01"], "1.schedule.lr=0.01 has no effect under decay: set it to its default, 0.0006"),
        (["train.keep_best=true", "train.eval_every=0"], "train.keep_best=true has no effect with train.eval_every=0"),
        (["train.keep_best=true", "train.save_every=0"], "it needs checkpoints of steps that are evaluated"),
        (["train.stages.0.schedule.decay_tokens=5"], "decay_tokens has no effect under constant: use power or wsd"),
        (["train.stages.0.schedule.warmup_tokens=9e9"], "warmup_tokens (9,000,000,000) and decay_tokens (0) together"),
        (["parallel.tensor=8"], "parallel.tensor=8 does not divide model.num_heads=4: use 1, 2 or 4"),
        (["parallel.tensor=2", "model.num_kv_heads=1"], "tensor=2 does not divide model.num_kv_heads=1: use 1"),
        (["parallel.tensor=2", "train.compile=model"], "train.compile=model needs parallel.tensor=1, not 2"),
        (["parallel.tensor=2", "train.compile=block", "train.recompute=selective"], "selective and parallel.tensor=2"),
        (
            ["parallel.ulysses=2", "train.compile=block", "train.recompute=selective"],
            "use train.compile=auto, train.compile_exchanges=true or train.recompute=full",
        ),
        (
            ["parallel.ring=2", "train.compile_exchanges=true", "train.compile=block", "train.recompute=selective"],
            "and parallel.ring=2: recomputation needs each block in one graph",
        ),
        (["parallel.keep_gathered=true"], "parallel.keep_gathered=true needs train.compile_exchanges=true"),
        (["parallel.overlap_gathers=true"], "parallel.overlap_gathers=true needs train.compile_exchanges=true"),
        (["parallel.copy_engines=true"], "parallel.copy_engines=true has no effect here"),
        (["parallel.copy_engines=true", "parallel.tensor=2"], "tensor > 1 with parallel.sequence=true and train.compile_exch"),
        (
            [
                "parallel.copy_engines=true",
                "parallel.tensor=2",
                "train.compile_exchanges=true",
                "parallel.overlap_gathers=true",
            ],
            "parallel.copy_engines=true overlaps gathers in its own way",
        ),
        (["parallel.zero_stage=0", "train.precision=bf16"], "parallel.zero_stage=0 cannot train in bf16"),
        (["parallel.overlap=true", "parallel.zero_stage=3"], "parallel.overlap=true needs parallel.zero_stage=1, not 3"),
        (
            ["parallel.tensor=2", "parallel.sequence=false", "train.compile_exchanges=true", "parallel.keep_gathered=true"],
            "parallel.keep_gathered=true has no effect with parallel.sequence=false, which gathers no tokens",
        ),
        (["parallel.overlap_bf16=true"], "parallel.overlap_bf16=true has no effect without parallel.overlap=true"),
        (["parallel.shard_within=node"], "parallel.shard_within=node needs parallel.overlap=true"),
        (["parallel.shard_within=2", "parallel.zero_stage=2"], "parallel.shard_within=2 needs parallel.overlap=true"),
        (["parallel.shard_within=0", "parallel.overlap=true"], "parallel.shard_within must be at least 1, not 0"),
        (["parallel.overlap=true", "train.compile=model"], "overlap=true does not go with train.compile=model"),
    ],
)  # fmt: skip
def test_tiny_sb_refuses(overrides, expected):
    fixed = ["model.num_heads=4", "train.batch_size=32"]  # the sentences name them, whatever tiny_sb is tuned to
    assert expected in refusal("tiny_sb", *fixed, *overrides)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["method=alibi"],
            "method=alibi does not go with model.mixers=[ssmax]: use nope or rope; SSMax scales q",
        ),
        (["method=fire"], "method=fire does not go with model.mixers=[ssmax]: use nope or rope; SSMax scales q"),
        (
            ["rope.factor=2"],
            "rope.factor=2 has no effect under scaling=none: set model.position.rope.scaling=linear",
        ),
        (["rope.scaling=linear"], "rope.scaling=linear with factor=1 changes nothing"),
        (["rope.scaling=ntk", "rope.factor=-2"], "model.position.rope.factor must be greater than 0, not -2.0"),
        (
            ["rope.scaling=dynamic_ntk"],
            "so it must know this length: set model.position.rope.train_length to the row length",
        ),
        (
            ["rope.scaling=dynamic_ntk", "rope.train_length=0"],
            "model.position.rope.train_length must be at least 1, not 0",
        ),
        (["rope.scaling=llama3"], "model.position.rope.scaling=llama3 with factor=1 changes nothing"),
        (
            ["rope.scaling=llama3", "rope.factor=8"],
            "scaling=llama3 needs model.position.rope.train_length, which is original_max_position_embeddings",
        ),
        (
            ["rope.scaling=llama3", "rope.factor=8", "rope.train_length=64", "rope.low_freq_factor=4"],
            "model.position.rope.low_freq_factor=4 must be above 0 and below model.position.rope.high_freq_factor=4",
        ),
        (
            ["rope.high_freq_factor=8"],
            "model.position.rope.high_freq_factor=8 has no effect without model.position.rope.scaling=llama3",
        ),
    ],
)
def test_ssmax_refuses_positions(overrides, expected):
    assert expected in refusal("tiny_ssmax", *(f"model.position.{override}" for override in overrides))


REFUSED = [(name, method) for name in MIXERS for method in POSITIONS if method not in MIXERS[name].positions]


@pytest.mark.parametrize(("core", "method"), REFUSED)
def test_every_refused_pair_has_its_sentence(core, method):
    text = refusal("tiny_softmax", f"model.mixers=[{core}]", f"model.position.method={method}")
    reason = {"ssmax": "would not be scaled", "stickbreaking": "takes the nearest keys first"}[core]
    assert text.startswith(f"model.position.method={method} does not go with model.mixers=[{core}]: ")
    assert reason in text


def test_a_bias_needs_its_variant():
    said = refusal("tiny_ssmax", "model.mixer.ssmax.bias=0.5")
    assert "model.mixer.ssmax.bias=0.5 has no effect under variant=learned: set model.mixer.ssmax.variant=bias" in said


def test_ntk_needs_a_second_pair():
    assert "a head of 2 dimensions has only one pair: use model.position.rope.scaling=linear" in refusal(
        "tiny_ssmax", "model.head_dim=2", "model.position.rope.scaling=ntk", "model.position.rope.factor=2"
    )


def test_flex_attention_needs_16_dimensions_on_a_gpu():
    overrides = ["model.position.method=alibi", "model.head_dim=8"]
    assert "no heads of 8 dimensions: use at least 16" in refusal("tiny_softmax", *overrides, gpu=True)
    validate(load_config(["config=tiny_softmax", *overrides]))


def test_whole_blocks_compile_with_selective_recomputation():
    keys = ["config=1b_sb", "parallel.tensor=2", "parallel.ulysses=2", "train.recompute=selective"]
    assert load_config(keys).compiled() is Compile.none
    whole = load_config([*keys, "train.compile_exchanges=true", "parallel.keep_gathered=true"])
    assert whole.compiled() is Compile.block
    validate(replace(whole, train=replace(whole.train, compile=Compile.block)))


@pytest.mark.parametrize(
    ("keys", "chosen"),  # whole blocks, gathered tokens kept, tokens copied
    [
        ([], (True, True, True)),
        (["parallel.sequence=false"], (True, False, False)),
        (["train.recompute=full"], (True, False, True)),
        (["train.fp8=rowwise"], (True, True, False)),
        (["parallel.overlap_gathers=true"], (True, True, False)),
        (["parallel.copy_engines=false", "parallel.keep_gathered=false"], (True, False, False)),
        (["train.compile=none"], (False, False, False)),
        (["parallel.zero_stage=3"], (False, False, False)),
        (["parallel.ring=2"], (False, False, False)),
        (["parallel.ulysses=2"], (False, False, False)),
        (["parallel.tensor=1"], (False, False, False)),
        (["train.compile_exchanges=false"], (False, False, False)),
    ],
)
def test_auto_chooses_the_fast_exchanges_of_tensor_parallelism(keys, chosen):
    asked = ["train.compile_exchanges=auto", "parallel.keep_gathered=auto", "parallel.copy_engines=auto"]
    config = load_config(["config=1b_sb", "parallel.tensor=2", *asked, *keys])
    validate(config, config.parallel.tensor * config.parallel.context, gpu=True)
    assert (config.whole_blocks(), config.keeps_gathered(), config.copies_tokens()) == chosen
    assert (config.whole_blocks(False), config.keeps_gathered(False), config.copies_tokens(False)) == (False,) * 3
    assert not config.copies_gradients


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (["train.compile=none"], "train.compile=block, not none"),
        (["parallel.zero_stage=2"], "needs parallel.zero_stage=1 and bf16"),
        (["train.precision=fp32"], "needs parallel.zero_stage=1 and bf16"),
        (["parallel.ring=2"], "does not go with parallel.ulysses and parallel.ring"),
        (["parallel.tensor=2", "parallel.copy_engines=false"], "needs parallel.copy_engines=true"),
        (["parallel.tensor=2", "train.recompute=full"], "does not go with train.recompute=full"),
        (["train.fp8=rowwise"], "does not go with train.fp8"),
        (["model.mixers=[ssmax]", "model.mixer.ssmax.variant=pn"], "weights that all layers share, which ssmax has"),
        (["model.mixers=[softmax]", "model.position.method=alibi"], "method=alibi, which makes a mask for each batch"),
        (
            ["parallel.tensor=2", "model.qk_norm=true"],
            "with parallel.tensor=2 does not go with the weights q_norm, k_norm",
        ),
    ],
)
def test_cuda_graphs_are_recorded_where_they_can_be(keys, sentence):
    config = load_config(["config=1b_sb", "data.one_document=true", *keys])
    assert not records_blocks(config)
    validate(config, gpu=True)
    assert sentence in refusal("1b_sb", "train.cuda_graphs=true", *keys, gpu=True)


@pytest.mark.parametrize(
    ("keys", "recorded"),
    [
        (["data.one_document=true"], False),
        (["parallel.tensor=2"], False),
        (["parallel.tensor=2", "data.one_document=true"], True),
        (["train.cuda_graphs=true"], True),
    ],
)
def test_auto_records_cuda_graphs_under_tensor_parallelism(keys, recorded):
    config = load_config(["config=1b_sb", *keys])
    validate(config, gpu=True)
    assert records_blocks(config) == recorded
    more = memory_per_gpu(config, 2).total - memory_per_gpu(change(config, ["train.cuda_graphs=false"]), 2).total
    assert (more > 2**29) == recorded  # the gradients of the blocks
    assert not records_blocks(load_config(["config=1b_sb", "parallel.tensor=2", "data.one_document=true"]), gpu=False)
    assert "needs GPUs" in refusal("tiny_sb", "train.cuda_graphs=true")


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_blocks_that_zero_3_gathers_compile_if_they_are_one_graph(recompute):
    keys = ["config=1b_sb", "parallel.zero_stage=3", f"train.recompute={recompute}"]
    assert load_config(keys).gathers_blocks(gpu=True)
    assert not load_config(keys).gathers_blocks(gpu=False)
    torn = load_config([*keys, "parallel.tensor=2"])
    assert torn.compiled() is Compile.none
    assert load_config([*keys, "parallel.tensor=2", "train.compile_exchanges=true"]).gathers_blocks()
    asked = load_config([*keys, "train.compile=block"])
    assert asked.gathers_blocks(gpu=False)
    validate(asked)


def test_the_ffn_of_350m_bounds_tensor_parallelism():
    validate(load_config(["config=350m_sb", "parallel.tensor=2"]))
    text = refusal("350m_sb", "parallel.tensor=4")
    assert "parallel.tensor=4 does not divide model.ffn_hidden_size=2730: use 1, 2, 3, 5, 6 or 7" in text


def test_sequence_parallelism_needs_tokens_that_divide():
    overrides = ["parallel.tensor=2", "data.length=255", "train.microbatch=1"]
    assert "set parallel.sequence=false" in refusal("tiny_sb", *overrides)
    validate(load_config(["config=tiny_sb", *overrides, "parallel.sequence=false"]))


def test_zero_stage_0_trains_in_fp32_only():
    config = load_config(["config=tiny_sb", "parallel.zero_stage=0"])
    validate(config, 1, gpu=False)  # precision=auto is fp32 on a CPU
    with pytest.raises(UserError, match=r"returns no gradient norm; use parallel.zero_stage=1"):
        validate(config, 1, gpu=True)


def test_ranks_of_nodes_that_do_not_divide() -> None:
    keys = ["parallel.overlap=true", "parallel.shard_within=6"]
    text = refusal("3b_sb", *keys, world_size=64)
    assert "parallel.shard_within=6 does not divide the 64 ranks of this run into nodes of 6: use" in text
    text = refusal("3b_sb", *keys, "parallel.tensor=4", "train.batch_size=30", world_size=24)
    assert (
        "parallel.tensor=4 does not divide its 6 ranks: use parallel.tensor=1, 2, 3 or 6, or parallel.shard_within=all"
        in text
    )
    validate(load_config(["config=3b_sb", keys[0], "parallel.shard_within=8", "parallel.tensor=4"]), 64, gpu=True)
    with pytest.raises(UserError, match="must be a whole number, all or node, not"):
        load_config(["config=3b_sb", "parallel.shard_within=rack"])


def test_world_size_must_fit_tensor_parallelism_and_batch():
    text = refusal("3b_sb", "parallel.tensor=2", world_size=3)
    assert text == (
        "parallel.tensor=2 does not divide the 3 processes of this run: use 1 or 3, or a multiple of 2 processes"
    )
    text = refusal("3b_sb", "train.microbatch=3", world_size=8)
    assert text == (
        "train.batch_size=1024 is not a multiple of the 24 rows that 8 data-parallel ranks of train.microbatch=3 take "
        "at once: use train.batch_size=1008 or 1032, or train.microbatch=1, 2, 4, 8, 16 or 32"
    )
    assert "use train.batch_size=1056" in refusal("3b_sb", world_size=528)
    validate(load_config(["config=3b_sb", "parallel.tensor=2"]), world_size=64, gpu=True)


@pytest.mark.parametrize(
    ("name", "overrides", "sentence"),
    [
        ("1b_sb", ["parallel.ulysses=5"], "24 key/value heads of the model: use parallel.ulysses=1, 2, 3, 4, 6 or 8"),
        (
            "1b_sb",
            ["parallel.tensor=2", "parallel.ulysses=8"],
            "12 on each of parallel.tensor=2 ranks: use parallel.ulysses=1,",
        ),
        (
            "1b_sb",
            ["parallel.ring=3"],
            "data.length=4096 is not a multiple of 6: use parallel.ring=1, 2, 4, 8, 16 or 32",
        ),
        (
            "350m_alibi",
            ["parallel.ring=2"],
            "which the ring's kernels do not: use parallel.ulysses instead of parallel.ring",
        ),
        ("350m_fire", ["parallel.ring=2"], "model.position.method=fire adds a bias to the logits"),
        ("350m_window512", ["parallel.ring=2"], "use parallel.ulysses instead"),
        ("1b_sb", ["parallel.ring=2", "train.compile=model"], "use train.compile=block"),
    ],
)
def test_context_parallelism_says_what_would_divide(name: str, overrides: list[str], sentence: str) -> None:
    assert sentence in refusal(name, *overrides)


def test_context_ranks_must_divide_the_processes():
    text = refusal("1b_sb", "parallel.ring=4", world_size=6)
    assert "4 context ranks do not divide the 6 processes that parallel.tensor=1 leaves of 6: use 1, 2, 3 or 6" in text
    validate(load_config(["config=1b_sb", "parallel.ulysses=2", "parallel.ring=2"]), world_size=8, gpu=True)
    validate(load_config(["config=350m_alibi", "parallel.ulysses=2"]), world_size=8, gpu=True)
    validate(load_config(["config=350m_rope_ntk", "parallel.ulysses=2", "parallel.ring=2"]), world_size=8, gpu=True)
