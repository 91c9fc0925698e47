"""Files, arguments and types."""

import dataclasses

import pytest

from ssscale.config import from_yaml, load_config, save, to_yaml
from ssscale.config.choices import DecayShape
from ssscale.config.schema import Config, StageConfig, optimizer_config
from ssscale.errors import UserError


def write(folder, name, text):
    path = folder / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def sentence(arguments, **kwargs):
    with pytest.raises(UserError) as error:
        load_config(arguments, **kwargs)
    text = str(error.value)
    assert "\n" not in text
    return text


def test_each_layer_wins_over_the_one_before(configs):
    write(configs, "part/one", "model: {num_layers: 2, hidden_size: 64, num_heads: 8}")
    write(configs, "part/two", "include: [part/one]\nmodel: {num_layers: 3, hidden_size: 32}")
    write(configs, "mine", "include: [part/two]\nmodel: {num_layers: 4}\ntrain: {seed: 7}")
    config = load_config(["config=mine", "model.num_layers=5", "train.seed=8"])
    assert (config.model.num_layers, config.model.hidden_size, config.model.num_heads) == (5, 32, 8)
    assert (config.train.seed, config.model.vocab_size, config.name) == (8, 50_257, "mine")


def test_later_includes_win_and_stage_lists_are_replaced(configs):
    write(configs, "a", "train: {stages: [{name: one}, {name: two}], seed: 1}")
    write(configs, "b", "train: {stages: [{tokens: 5}], seed: 2}")
    write(configs, "run", "include: [a, b]")
    train = load_config(["config=run"]).train
    assert train.seed == 2
    assert train.stages == [StageConfig(tokens=5)]


def test_a_path_may_lie_anywhere_and_include_beside_itself(configs, tmp_path, monkeypatch):
    write(configs, "base", "train: {seed: 3}")
    write(tmp_path, "work/near", "train: {log_every: 4}")
    write(tmp_path, "work/mine", "name: other\ninclude: [base, near.yaml]")
    monkeypatch.chdir(tmp_path)
    config = load_config(["config=work/mine.yaml"])
    assert (config.name, config.train.seed, config.train.log_every) == ("other", 3, 4)


def test_arguments_reach_stages_and_whole_sections():
    config = load_config(
        [
            "config=3b_sb",
            "train.stages.0.tokens=1e9",
            "train.stages.1.mix={web: 0.5, new: 0.5}",
            "train.stages.0.mix.web=0.1",
            "model.mixer={stickbreaking: {remainder: true}}",
            "optimizer.adamw.betas=[0.8, 0.9]",
            "data.path=s3://bucket/a=b",
            "model.num_kv_heads=4",
            "parallel.sequence=false",
            "train.stages.0.schedule.kind=wsd",
        ]
    )
    first, second = config.train.stages
    assert (first.tokens, first.mix, second.mix) == (10**9, {"web": 0.1, "code": 0.25}, {"web": 0.5, "new": 0.5})
    assert isinstance(first.tokens, int)
    assert first.schedule.kind == "wsd"
    assert second.schedule.decay_shape is DecayShape.exponential
    assert (config.model.mixer.stickbreaking.remainder, config.model.mixers) == (True, ["stickbreaking"])
    assert config.optimizer.adamw.betas == (0.8, 0.9)
    assert config.data.path == "s3://bucket/a=b"
    assert (config.model.kv_heads, config.parallel.sequence) == (4, False)


def test_a_mix_that_was_null_can_be_filled():
    assert load_config(["config=tiny_sb", "train.stages.0.mix.code=1"]).train.stages[0].mix == {"code": 1.0}


def test_values_may_refer_to_other_keys(configs):
    write(configs, "run", "name: x\ndata: {path: 'data/${name}'}\ntrain: {eval_every: '${train.save_every}'}")
    config = load_config(["config=run", "train.save_every=30", "name=y"])
    assert (config.data.path, config.train.eval_every) == ("data/y", 30)


def test_round_trip_is_exact(tmp_path):
    config = load_config(["config=3b_sb", "train.stages.0.schedule.lr=0.1234567890123456789", "name='1e5'"])
    odd = dataclasses.replace(config, run_dir="null", optimizer=optimizer_config(eps=1e-17))
    for one in (Config(), config, odd):
        assert from_yaml(to_yaml(one)) == one
    save(odd, tmp_path / "config.yaml")
    assert from_yaml((tmp_path / "config.yaml").read_text()) == odd
    assert odd.name == "1e5"


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("train.micobatch=2", "there is no key 'train.micobatch'; did you mean train.microbatch?"),
        ("modle.num_layers=2", "there is no key 'modle.num_layers'; did you mean model.num_layers?"),
        ("microbatch=2", "there is no key 'microbatch'; did you mean train.microbatch or train.stages.0.microbatch?"),
        ("train.stages.1.schedule.llr=2", "did you mean train.stages.1.schedule.lr?"),
        ("gpu=64", "there is no key 'gpu'; did you mean gpus?"),
        ("zzz.qqq=1", "there is no key 'zzz.qqq'; ssscale/config/schema.py lists them all"),
        ("model.num_layers.x=1", "did you mean model.num_layers?"),
        (
            "model.mixer.own.rate=1",
            "use the options of softmax, ssmax or stickbreaking, or name the file of the plugin",
        ),
        ("model.mixer.stickbraking.skip_below=0", "use the options of stickbreaking, or name the file of the plugin"),
        ("optimizer.kind=muon", "there is no key 'optimizer.kind'; did you mean optimizer.name?"),
        ("model.position.type=alibi", "did you mean model.position.method?"),
        ("train.stages.0.schedule.name=wsd", "did you mean train.stages.0.schedule.kind?"),
        ("optimizer.weigth_decay=0", "did you mean optimizer.weight_decay?"),
        ("model.num_layers=two", "model.num_layers must be a whole number, not 'two'"),
        ("model.num_layers=2.5", "model.num_layers must be a whole number, not 2.5"),
        ("model.num_layers=true", "model.num_layers must be a whole number, not true"),
        ("model.num_layers=null", "model.num_layers must be a whole number, not null"),
        ("model.num_layers=.inf", "model.num_layers must be a whole number, not inf"),
        ("optimizer.adamw.eps=.nan", "optimizer.adamw.eps must be a number, not nan"),
        ("optimizer.adamw.eps=small", "optimizer.adamw.eps must be a number, not 'small'"),
        ("data.one_document=1", "data.one_document must be true or false, not 1"),
        ("data.path=[a]", "data.path must be text, not ['a']"),
        (
            "model.mixer.ssmax.variant=learnd",
            "model.mixer.ssmax.variant must be one of learned, fixed, bias, pn, not 'learnd'",
        ),
        ("optimizer.adamw.betas=0.9", "optimizer.adamw.betas must be a list of 2 numbers, not 0.9"),
        ("optimizer.adamw.betas=[1,2,3]", "optimizer.adamw.betas must be a list of 2 numbers, not [1, 2, 3]"),
        ("model=3", "model is a section, not 3: set its keys, such as model.num_layers"),
        ("train.stages=3", "train.stages must be a list, not 3"),
        ("train.stages.2.tokens=3", "train.stages has 2 entries, numbered from 0; '2' is not one of them"),
        ("train.stages.0.mix=[a]", "train.stages.0.mix must be a section of `name: number`, not ['a']"),
        ("train.stages.0.mix.web=much", "train.stages.0.mix.web must be a number, not 'much'"),
        ("--fast", "'--fast' is not of the form key=value: write fast=VALUE, without spaces or dashes"),
        ("tiny_sb", "'tiny_sb' is not of the form key=value: write config=tiny_sb"),
        ("=3", "'=3' is not of the form key=value: write key=VALUE"),
        ("train.seed=", "train.seed= has no value: write train.seed=VALUE"),
        ("name=[a", "name=[a: the value is not valid YAML"),
        ("name=${nope}", "name: Interpolation key 'nope' not found"),
        ("train=${name}", "train is a section, not '${name}'"),
        ("train.stages=${name}", "train.stages must be a list, not '${name}'"),
        ("config=3b_sb", "config=NAME is given more than once"),
    ],
)
def test_a_wrong_argument_gives_a_sentence(argument, expected):
    assert expected in sentence(["config=3b_sb", argument], options=["gpus", "mfu"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model: {num_layer: 2}", "no key 'model.num_layer' (in {path}); did you mean model.num_layers?"),
        ("train: {stages: [{token: 2}]}", "'train.stages.0.token' (in {path}); did you mean train.stages.0.tokens?"),
        ("model: {num_layers: two}", "model.num_layers must be a whole number, not 'two' (in {path})"),
        ("model:", "model is a section, not null: set its keys, such as model.num_layers (in {path})"),
        ("a: b\n  c: d", "{path} is not valid YAML in line 2"),
        ("name: a\nname: b", "{path} is not valid YAML in line 2"),
        ("- a", "{path} must hold `key: value` lines, not a list"),
        ("# a: b", "{path} is empty: it would train the defaults, which are no recipe"),
        ("name: ${a", "{path} is not valid YAML"),
        ("include: [nope]", "include of 'nope' in {path}: there is no configs/nope.yaml; did you mean"),
        ("include: [nope.yaml]", "include of 'nope.yaml' in {path}: there is no file"),
        ("include: part", "include in {path} must be a list of names"),
        ("include: [bad]", "{path} includes itself"),
        ("include: [loop]", "includes itself: {path} →"),
    ],
)
def test_a_wrong_file_gives_a_sentence_with_its_name(configs, text, expected):
    write(configs, "bad", text)
    write(configs, "loop", "include: [bad]")
    assert expected.replace("{path}", "configs/bad.yaml") in sentence(["config=bad"])


def test_a_run_file_of_another_name_is_refused_and_a_bare_one_is_corrected(tmp_path):
    (tmp_path / "run.yml").write_text("include: [tiny_sb]")
    assert f"config={tmp_path}/run.yml: the name of a configuration file ends in .yaml" in sentence(
        [f"config={tmp_path}/run.yml"]
    )
    assert f"write config={tmp_path}/run.yml" in sentence([f"{tmp_path}/run.yml"])


def test_a_missing_run_file_is_answered_with_the_nearest():
    assert "there is no configs/3b_bs.yaml; did you mean 3b_sb" in sentence(["config=3b_bs"])
    assert "config=a/b.yaml: there is no file a/b.yaml" in sentence(["config=a/b.yaml"])
    assert "there is no configs/a/b.yaml; there are 162m_sb" in sentence(["config=a/b"])
    assert "config=NAME is missing: name one of 162m_sb" in sentence([])
    assert "config=NAME is missing" in sentence(["config="])
