"""One forward pass, with every input and output that transformers has names for."""

import torch
import torch.nn.functional as F

from tests.hf.uses.subject import TEXTS, Subject, equal, padded, refused, same, use


def check_batch(s: Subject, left: bool) -> None:
    ids, mask = padded(TEXTS, left)
    with torch.no_grad():
        found = s.model(ids, attention_mask=mask).logits[mask.bool()]
    equal(found, torch.cat([s.reference()(text).logits for text in TEXTS]))


@use("a batch padded on the left")
def left_padding(s: Subject) -> None:
    check_batch(s, left=True)


@use("a batch padded on the right")
def right_padding(s: Subject) -> None:
    check_batch(s, left=False)


@use("a text longer than those of the training")
def longer(s: Subject) -> None:
    text = [(7 * i) % 300 for i in range(2 * s.model.config.max_position_embeddings)]
    equal(s.model(torch.tensor([text])).logits[0], s.reference()(text).logits)


@use("`labels`, −100 for none")
def labels(s: Subject) -> None:
    ids, mask = padded(TEXTS, left=False)
    marked = ids.masked_fill(mask == 0, -100)
    marked[0, 3:8] = -100
    logits = [s.reference()(text).logits[:-1] for text in TEXTS]
    targets = [marked[row, 1 : len(text)] for row, text in enumerate(TEXTS)]
    expected = F.cross_entropy(torch.cat(logits), torch.cat(targets), ignore_index=-100)
    equal(s.model(ids, attention_mask=mask, labels=marked).loss, expected)


@use("`num_items_in_batch`")
def num_items(s: Subject) -> None:
    text = TEXTS[0]
    ids = torch.tensor([text])
    found = s.model(ids, labels=ids, num_items_in_batch=7).loss
    equal(found, s.reference().loss([text]) * (len(text) - 1) / 7)


@use("gradients of the loss")
def gradients(s: Subject) -> None:
    model, reference = s.load(), s.reference()
    weights = reference.trainable()
    text = TEXTS[0]
    model(torch.tensor([text]), labels=torch.tensor([text])).loss.backward()
    reference.loss([text]).backward()
    named = dict(model.named_parameters())
    assert named.keys() == weights.keys(), named.keys() ^ weights.keys()
    for name, weight in named.items():
        equal(weight.grad, weights[name].grad, name)


@use("`logits_to_keep`, a number or indices")
def logits_to_keep(s: Subject) -> None:
    ids = torch.tensor([TEXTS[0]])
    expected = s.reference()(TEXTS[0]).logits
    equal(s.model(ids, logits_to_keep=3).logits[0], expected[-3:])
    equal(s.model(ids, logits_to_keep=torch.tensor([2, 5])).logits[0], expected[[2, 5]])


@use("`labels` with `logits_to_keep`")
def labels_of_kept(s: Subject) -> str:
    ids = torch.tensor([TEXTS[0]])
    return refused(lambda: s.model(ids, labels=ids, logits_to_keep=3), "logits_to_keep")


@use("`inputs_embeds`")
def inputs_embeds(s: Subject) -> None:
    x = torch.randn(1, 9, s.model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    equal(s.model(inputs_embeds=x).logits[0], s.reference()(x[0]).logits)


@use("`input_ids` together with `inputs_embeds`")
def two_inputs(s: Subject) -> str:
    ids = torch.tensor([TEXTS[0]])
    return refused(lambda: s.model(ids, inputs_embeds=s.model.embedding(ids)), "input_ids", "inputs_embeds")


@use("`position_ids` of one text")
def position_ids(s: Subject) -> None:
    expected = s.reference()(TEXTS[0]).logits
    for start in (0, 40):  # rotary positions are relative, and SSMax counts keys
        positions = torch.arange(start, start + len(TEXTS[0]))[None]
        equal(s.model(torch.tensor([TEXTS[0]]), position_ids=positions).logits[0], expected)


@use("`position_ids` of packed texts")
def packed(s: Subject) -> None:
    ids = torch.tensor([[token for text in TEXTS for token in text]])
    positions = torch.tensor([[i for text in TEXTS for i in range(len(text))]])
    expected = torch.cat([s.reference()(text).logits for text in TEXTS])
    equal(s.model(ids, position_ids=positions).logits[0], expected)


@use("`token_type_ids`")
def token_types(s: Subject) -> None:
    ids = torch.tensor([TEXTS[0]])
    equal(s.model(ids, token_type_ids=torch.ones_like(ids)).logits[0], s.reference()(TEXTS[0]).logits)


@use("`output_hidden_states`")
def hidden_states(s: Subject) -> None:
    found = s.model(torch.tensor([TEXTS[0]]), output_hidden_states=True).hidden_states
    expected = s.reference()(TEXTS[0]).states
    same(len(found), len(expected))
    for one, other in zip(found, expected):
        equal(one[0], other)


@use("`output_attentions`")
def attentions(s: Subject) -> None:
    ids, mask = padded(TEXTS, left=True)
    found = s.model(ids, attention_mask=mask, output_attentions=True).attentions
    for row, text in enumerate(TEXTS):
        for one, other in zip(found, s.reference()(text).weights, strict=True):
            equal(one[row, :, -len(text) :, -len(text) :], other)


@use("`return_dict=False`")
def as_tuple(s: Subject) -> None:
    ids = torch.tensor([TEXTS[0]])
    loss, logits, *_ = s.model(ids, labels=ids, return_dict=False)
    equal(loss, s.reference().loss([TEXTS[0]]))
    equal(logits[0], s.reference()(TEXTS[0]).logits)


@use("a mask of another shape")
def wrong_mask(s: Subject) -> str:
    ids = torch.tensor([TEXTS[0]])
    return refused(lambda: s.model(ids, attention_mask=torch.ones(1, 5)), "attention_mask must be [1, 22]")


@use("a four-dimensional mask")
def mask_4d(s: Subject) -> str:
    ids = torch.tensor([TEXTS[0]])
    mask = torch.ones(1, 1, 22, 22).tril()
    return refused(lambda: s.model(ids, attention_mask=mask), "attention_mask must be [1, 22]")


@use("`attn_implementation` eager or sdpa")
def attn_implementation(s: Subject) -> None:
    for name in ("eager", "sdpa"):
        model = s.load(attn_implementation=name)
        equal(model(torch.tensor([TEXTS[0]])).logits[0], s.reference()(TEXTS[0]).logits)


@use("`attn_implementation` flash_attention_2")
def flash_attention(s: Subject) -> str:
    return refused(lambda: s.load(attn_implementation="flash_attention_2"), "does not support Flash Attention")


@use("autocast to bfloat16")
def autocast(s: Subject) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = s.model(torch.tensor([TEXTS[0]])).logits[0]
    expected = s.reference()(TEXTS[0]).logits
    assert 0 < (found - expected).std() < 0.05 * expected.std()


@use("a model in training mode gives no cache")
def training_mode(s: Subject) -> None:
    model = s.load().train()
    found = model(torch.tensor([TEXTS[0]]))
    assert found.past_key_values is None
    equal(found.logits[0], s.reference()(TEXTS[0]).logits)


@use("`torch.compile(fullgraph=True)`", slow=True)
def compiled(s: Subject) -> None:
    forward = torch.compile(s.load(), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        equal(forward(torch.tensor([TEXTS[0]])).logits[0], s.reference()(TEXTS[0]).logits)


@use("`torch.compile(fullgraph=True)` of a padded batch", slow=True)
def compiled_padded(s: Subject) -> None:
    forward = torch.compile(s.load(), fullgraph=True, backend="aot_eager")
    ids, mask = padded(TEXTS, left=True)
    with torch.no_grad():
        found = forward(ids, attention_mask=mask).logits[mask.bool()]
    equal(found, torch.cat([s.reference()(text).logits for text in TEXTS]))


@use("`torch.compile(fullgraph=True)` of packed texts, with gradients", slow=True)
def compiled_packed(s: Subject) -> None:
    model, reference = s.load().train(), s.reference()
    weights = reference.trainable()
    ids = torch.tensor([[token for text in TEXTS for token in text]])
    positions = torch.tensor([[i for text in TEXTS for i in range(len(text))]])
    forward = torch.compile(model, fullgraph=True, backend="aot_eager")
    marked = ids.masked_fill(positions == 0, -100)
    loss = forward(ids, position_ids=positions, labels=marked).loss
    loss.backward()
    expected = reference.loss(TEXTS)
    expected.backward()
    equal(loss, expected)
    for name, weight in model.named_parameters():
        equal(weight.grad, weights[name].grad, name)
