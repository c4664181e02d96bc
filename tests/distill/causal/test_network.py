import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from isthmus.distill.causal.models import prune_embeddings, student
from isthmus.distill.causal.network import CausalStudent, Packed, continuation_targets, generate, losses
from isthmus.distill.causal.texts import pack
from isthmus.distill.causal.tokenizer import Vocabulary
from isthmus.distill.losses.logits import IGNORED
from isthmus.features.errors import ConfigurationError, DataError
from tests.distill.causal.support import SHAPE, base, domain, general, teacher, tokenizer

VOCABULARY = Vocabulary(b"", 0, 300)


def block(texts: list[str], context: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    tokens = [encoding.ids for encoding in tokenizer().encode_batch(texts)]
    found = pack(tokens, np.arange(len(texts)), context, end(), cut=True, where="")
    return tuple(map(torch.from_numpy, (found.tokens, found.positions, found.targets)))  # type: ignore[return-value]


def end() -> int:
    return int(base()[0].config.eos_token_id)


@torch.no_grad()
def test_texts_of_a_block_do_not_see_each_other() -> None:
    network = Packed(base()[0])
    texts = [*general(2, 9), *domain(1, 9)]
    tokens, positions, targets = block(texts)
    together = losses(network(tokens, positions), targets)[0]
    alone = []
    for text in texts:
        (ids,) = ([*encoding.ids, end()] for encoding in tokenizer().encode_batch([text]))
        row = torch.tensor([ids])
        logits = network.model(input_ids=row).logits[0, :-1]
        alone += [*nn.functional.cross_entropy(logits, row[0, 1:], reduction="none"), torch.tensor(0.0)]
    torch.testing.assert_close(together[: len(alone)], torch.stack(alone)[:64], rtol=1e-4, atol=1e-5)


@pytest.mark.accept
@torch.no_grad()
def test_what_a_model_writes_is_what_transformers_generates_and_what_no_cache_gives() -> None:
    model = teacher()[0]
    network, (tokens, positions, _) = Packed(model), block([general(1, 9)[0], domain(1, 9)[0]])
    tokens = torch.cat([tokens[:1], torch.roll(tokens[:1], 3, 1)])
    positions = torch.arange(64).repeat(2, 1)
    found = generate(network, tokens, positions, 6, end(), greedy=True)
    by_hand = tokens[:, :6]
    for _ in range(58):
        last = network(by_hand, torch.arange(by_hand.shape[1]).repeat(2, 1))[:, -1].argmax(-1)
        ended = (by_hand[:, 5:] == end()).any(1)
        by_hand = torch.cat([by_hand, last.masked_fill(ended, end())[:, None]], 1)
    assert torch.equal(found, by_hand)
    generated = model.generate(tokens[:, :6], do_sample=False, max_length=64, eos_token_id=end(), pad_token_id=end())
    assert torch.equal(found[:, : generated.shape[1]], generated)


@torch.no_grad()
def test_a_prompt_with_two_texts_is_continued_in_the_second() -> None:
    network = Packed(teacher()[0])
    first, second = (tokenizer().encode(text).ids for text in (general(1, 9)[0], domain(1, 9)[0]))
    prompt = [*first[:5], end(), *second[:6]]
    tokens = torch.tensor([prompt + [0] * 20])
    positions = torch.tensor([[*range(6), *range(26)]])
    found = generate(network, tokens, positions, 12, end(), greedy=True)
    alone = generate(network, tokens[:, 6:], positions[:, 6:], 6, end(), greedy=True)
    assert torch.equal(found[:, 6:], alone)
    places, targets = continuation_targets(found, positions, 12, end())
    assert places[0].tolist() == [*range(6), *range(26)]
    assert (targets[0, :11] == IGNORED).all()
    stop = (found[0, 12:] == end()).nonzero()
    last = 12 + int(stop[0]) if len(stop) else 31
    assert torch.equal(targets[0, 11:last], found[0, 12 : last + 1])
    assert (targets[0, last:] == IGNORED).all()


@torch.no_grad()
def test_what_is_drawn_follows_from_the_seed_and_stops_at_the_end() -> None:
    network, (tokens, positions, _) = Packed(base()[0]), block(general(6, 9), 32)
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(generate(network, tokens, positions, 4, end(), greedy=False))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert torch.equal(drawn[0][:, :4], tokens[:, :4])
    over = (drawn[0][:, 3:] == end()).cummax(1).values
    assert (drawn[0][:, 3:][over] == end()).all()


@torch.no_grad()
def test_nothing_is_drawn_from_logits_that_are_no_numbers() -> None:
    sick = copy.deepcopy(base()[0])
    sick.get_output_embeddings().weight.fill_(torch.nan)
    tokens, positions, _ = block(general(6, 9), 32)
    with pytest.raises(DataError, match="after 4 tokens are not finite"):
        generate(Packed(sick), tokens, positions, 4, end(), greedy=False)


@torch.no_grad()
def test_a_trimmed_model_says_the_same_of_the_tokens_that_are_kept() -> None:
    model, _ = base()
    kept = np.array([0, 3, 4, 70, 71, 200], np.int64)
    less = prune_embeddings(model, Vocabulary(b"", 0, len(kept), kept))
    tokens, positions = torch.tensor([[1, 2, 5, 3]]), torch.arange(4)[None]
    torch.testing.assert_close(Packed(less)(tokens, positions), Packed(model, kept)(tokens, positions))
    assert less.config.vocab_size == 6
    assert less.get_input_embeddings().weight is less.get_output_embeddings().weight
    assert prune_embeddings(model, VOCABULARY) is not model


def test_a_student_gives_its_logits_in_training_and_its_losses_outside() -> None:
    pupil, (tokens, positions, targets) = CausalStudent(base()[0]).train(), block(general(2, 9))
    learned = pupil(tokens, positions, targets)
    assert torch.equal(learned["counts"], targets != IGNORED)
    with torch.no_grad():
        measured = pupil.eval()(tokens, positions, targets)
    torch.testing.assert_close(measured["losses"], losses(learned["logits"], targets).detach())
    assert torch.equal(measured["best"], learned["logits"].argmax(-1))


def test_a_new_student_has_the_declared_sizes() -> None:
    model = student(None, VOCABULARY, 64, SHAPE, "writer")
    assert (model.config.vocab_size, model.config.hidden_size, len(model.model.layers)) == (300, 32, 1)
    with pytest.raises(ConfigurationError, match="width 30 and heads 4; expected an even number of units for each"):
        student(None, VOCABULARY, 64, {**SHAPE, "width": 30, "heads": 4}, "writer")
    with pytest.raises(ConfigurationError, match="returns a model of 301 tokens; expected a model of 300 tokens"):
        student("tests.distill.causal.support:other_size", VOCABULARY, 64, SHAPE, "writer")
