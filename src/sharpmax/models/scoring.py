"""Score a language model: prompts as tokens, the loss of a given reply, and whether greedy decoding gives it."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sharpmax.errors import reject_type
from sharpmax.models.language import any_length, check_tokenizer
from sharpmax.tasks.prompt import Prompt
from sharpmax.tasks.vocabulary import WORDS

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_IGNORED = -100


@dataclass(frozen=True)
class Reply:
    """The tokens of a prompt and its answer; the answer begins at `start`."""

    ids: tuple[int, ...]
    start: int
    positions: tuple[int, ...] | None = field(default=None, kw_only=True)
    """The positions of the tokens; None: consecutive."""

    @property
    def tokens(self) -> int:
        """How many tokens the answer has."""
        return len(self.ids) - self.start


@dataclass(frozen=True)
class Judged:
    """The score of a reply: its summed loss in nats, and whether greedy decoding gives exactly this answer."""

    nll: float
    tokens: int
    right: bool


def encode(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, before: str = "") -> Reply:
    """A prompt as one turn of a chat (plain text for a model without a chat template), `before` put in front of it."""
    check_tokenizer(tokenizer)
    if not isinstance(prompt, Prompt):
        reject_type("prompt", type(prompt).__name__, "a Prompt", "make some: get_task('kv').prompts(8, 1, seed=0)")
    asked = asked_with(tokenizer, prompt, before)
    special = tokenizer.chat_template is None
    read = tokenizer(asked, add_special_tokens=special).input_ids
    whole = tokenizer(asked + prompt.answer, add_special_tokens=special).input_ids
    # A tokenizer may join the end of the opening with the answer: then the answer begins with the joined token.
    start = next((i for i, (a, b) in enumerate(zip(read, whole, strict=False)) if a != b), min(len(read), len(whole)))
    return Reply(tuple(whole), start)


def asked_with(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, before: str = "") -> str:
    """The text a model reads up to where it has to go on."""
    return _asked(tokenizer, before + prompt.user) + prompt.opening


def _asked(tokenizer: PreTrainedTokenizerBase, user: str) -> str:
    if tokenizer.chat_template is None:
        return f"{user}\n"
    chat = [{"role": "user", "content": user}]
    return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))


def batches(replies: Sequence[Reply], most_tokens: int, most_rows: int | None = None) -> Iterator[list[int]]:
    """Indices of replies to read together: of similar length, so that little of `most_tokens` is padding.

    `most_rows` limits the predictions of a batch: the tokens of its answers, padded to the longest.
    """
    batch: list[int] = []
    for index in sorted(range(len(replies)), key=lambda i: len(replies[i].ids)):
        size = len(batch) + 1
        rows = size * max(replies[i].tokens for i in (*batch, index))
        if batch and (size * len(replies[index].ids) > most_tokens or (most_rows is not None and rows > most_rows)):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


@dataclass(frozen=True)
class Places:
    """A batch of replies: tokens `[replies, longest]`, and the places whose tokens are predicted."""

    ids: Tensor
    rows: Tensor  # the rows that predict them: each before its place
    wanted: Tensor  # `[replies, places]`: the tokens, −100 where a reply has none to predict
    positions: Tensor | None

    @classmethod
    def of(cls, replies: Sequence[Reply], device: torch.device, most: int | None = None, seed: str = "") -> Places:
        """All tokens of the answers, or `most` places of them, drawn at random.

        Shorter replies are padded on the right, where causal attention hides it.
        """
        longest = max(len(reply.ids) for reply in replies)
        ids = torch.zeros(len(replies), longest, dtype=torch.long)
        target = torch.full((len(replies), longest), _IGNORED)
        for row, reply in enumerate(replies):
            ids[row, : len(reply.ids)] = torch.tensor(reply.ids)
            target[row, reply.start : len(reply.ids)] = torch.tensor(reply.ids[reply.start :])
        places = (target != _IGNORED).any(0).nonzero()[:, 0]
        if most is not None and len(places) > most:
            places = torch.tensor(sorted(random.Random(seed).sample(places.tolist(), most)))
        wanted = target[:, places].to(device)
        return cls(ids.to(device), (places - 1).to(device), wanted, _positions(replies, longest))

    @property
    def count(self) -> int:
        """How many tokens are predicted."""
        return int((self.wanted != _IGNORED).sum())

    def logits(self, model: PreTrainedModel) -> Tensor:
        """Logits of the places, `[replies, places, vocabulary]`, in float32."""
        return _logits(model, self.ids, self.rows, self.positions)

    def losses(self, logits: Tensor) -> Tensor:
        """Loss in nats of each token, `[replies, places]`; 0 where there is none."""
        nll = F.cross_entropy(logits.flatten(0, 1), self.wanted.flatten(), ignore_index=_IGNORED, reduction="none")
        return nll.view_as(self.wanted)

    def divergences(self, baseline: Tensor, logits: Tensor) -> Tensor:
        """KL(baseline ‖ now) in nats of each prediction, `[replies, places]`; 0 where there is none."""
        before, after = baseline.log_softmax(-1), logits.log_softmax(-1)
        return (before.exp() * (before - after)).sum(-1) * (self.wanted != _IGNORED)


def reply_losses(model: PreTrainedModel, replies: Sequence[Reply]) -> tuple[Tensor, Tensor]:
    """Loss in nats and correctness of each token of the answers, `[replies, places]`; 0 and True where there is none.

    Places without a token of any answer are left out.
    """
    places = Places.of(replies, model.device)
    logits = places.logits(model)
    right = (logits.detach().argmax(-1) == places.wanted) | (places.wanted == _IGNORED)
    return places.losses(logits), right


def judge(model: PreTrainedModel, replies: Sequence[Reply], most_tokens: int = 16_384) -> list[Judged]:
    """Score each reply.

    Greedy decoding gives an answer if and only if each of its tokens is the likeliest one after those before it, so one
    forward pass is enough.
    """
    if not isinstance(model, nn.Module):
        reject_type("model", type(model).__name__, "a causal language model of transformers")
    wrong = [type(one).__name__ for one in replies if not isinstance(one, Reply)]
    if wrong:
        reject_type("replies", f"a {wrong[0]}", "what `encode` makes of prompts")
    judged: dict[int, Judged] = {}
    with torch.no_grad():
        for batch in batches(replies, most_tokens):
            nll, right = reply_losses(model, [replies[i] for i in batch])
            for i, loss, good in zip(batch, nll.sum(-1).tolist(), right.all(-1).tolist(), strict=True):
                judged[i] = Judged(loss, replies[i].tokens, good)
    return [judged[i] for i in range(len(replies))]


def window_losses(model: PreTrainedModel, windows: Sequence[Sequence[int]]) -> Tensor:
    """Mean loss in nats per token of each window of plain text, all of one length."""
    ids = torch.tensor(windows, device=model.device)
    logits = _logits(model, ids, torch.arange(ids.shape[1] - 1, device=ids.device))
    losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return losses.view(len(windows), -1).mean(-1)


def sampled_texts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, count: int, length: int, seed: int
) -> list[list[int]]:
    """Texts of `length` tokens that the model writes at temperature 1, each after a random word.

    They stand for all that the model was trained on, and need no data.
    """
    rng = random.Random(f"sampled/{seed}")
    starts = [tokenizer(f"{word.title()}").input_ids for word in rng.choices(WORDS, k=count)]
    shortest = min(map(len, starts))
    ids = torch.tensor([start[:shortest] for start in starts], device=model.device)
    generator = torch.Generator().manual_seed(seed)
    call: Any = model
    cache, read = None, ids
    with torch.no_grad(), any_length(model.device):
        while ids.shape[1] < length:
            out = call(input_ids=read, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            # The random numbers come from the CPU: no device needs a generator of its own, and no logits are copied.
            drawn = torch.rand(count, 1, generator=generator).to(ids.device)
            reached = out.logits[:, -1].float().softmax(-1).cumsum(-1)
            read = torch.searchsorted(reached, drawn).clamp_max(reached.shape[-1] - 1)
            ids = torch.cat([ids, read], dim=1)
    found: list[list[int]] = ids[:, :length].tolist()
    return found


def own_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[str],
    new_tokens: int = 64,
    at_once: int = 32,
) -> list[Reply]:
    """The model's own answers to questions, by greedy decoding of up to `new_tokens` tokens each."""
    special = tokenizer.chat_template is None
    asked = [tokenizer(_asked(tokenizer, one), add_special_tokens=special).input_ids for one in questions]
    replies = []
    for start in range(0, len(asked), at_once):
        replies += generated(model, asked[start : start + at_once], new_tokens)
    return replies


def generated(
    model: PreTrainedModel,
    asked: Sequence[Sequence[int]],
    new_tokens: int,
    end: int | None = None,
    complete: Callable[..., Tensor] | None = None,
) -> list[Reply]:
    """The answer to each of several questions, by greedy decoding of up to `new_tokens` tokens or until `end`.

    By default an answer ends at the end tokens of the model's configuration. `complete` is a stopping criterion of
    transformers that says which answers need no more tokens.
    """
    longest = max(map(len, asked))
    ids = torch.zeros(len(asked), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, one in enumerate(asked):  # padded on the left: what is generated follows the question
        ids[row, longest - len(one) :] = torch.tensor(one)
        mask[row, longest - len(one) :] = 1
    ends: Any = end
    if end is None and model.generation_config is not None:
        ends = model.generation_config.eos_token_id
    stops = set(ends if isinstance(ends, list) else [ends])
    generate: Any = model.generate  # typed as if it were a tensor
    with torch.no_grad(), any_length(model.device):
        answers = generate(
            input_ids=ids.to(model.device), attention_mask=mask.to(model.device), max_new_tokens=new_tokens,
            do_sample=False, pad_token_id=0, stopping_criteria=None if complete is None else [complete],
            **({} if end is None else {"eos_token_id": end}),
        )[:, longest:].tolist()  # fmt: skip
    cut = (next((i + 1 for i, token in enumerate(answer) if token in stops), len(answer)) for answer in answers)
    return [Reply((*one, *answer[:end]), len(one)) for one, answer, end in zip(asked, answers, cut, strict=True)]


def generated_texts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    new_tokens: int,
    most_tokens: int = 65_536,
) -> list[str]:
    """What greedy decoding adds to the opening of each prompt, until it contains all of the references."""
    special = tokenizer.chat_template is None
    texts = [asked_with(tokenizer, one) for one in prompts]
    asked = [Reply(tuple(tokenizer(one, add_special_tokens=special).input_ids), 0) for one in texts]
    answers: dict[int, list[int]] = {}
    for batch in batches(asked, most_tokens):
        complete = _holds_references(tokenizer, [prompts[i] for i in batch], len(asked[batch[-1]].ids))
        replies = generated(model, [asked[i].ids for i in batch], new_tokens, complete=complete)
        answers |= {i: list(one.ids[one.start :]) for i, one in zip(batch, replies, strict=True)}
    return tokenizer.batch_decode([answers[i] for i in range(len(prompts))], skip_special_tokens=True)


def _holds_references(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], start: int
) -> Callable[..., Tensor]:
    """A stopping criterion: answers, from `start` on, that contain all references of their prompt."""

    def complete(ids: Tensor, scores: Tensor, **options: Any) -> Tensor:
        texts = tokenizer.batch_decode(ids[:, start:], skip_special_tokens=True)
        pairs = zip(texts, prompts, strict=True)
        done = [all(one.lower() in text.lower() for one in prompt.references) for text, prompt in pairs]
        return torch.tensor(done, device=ids.device)

    return complete


def _positions(replies: Sequence[Reply], longest: int) -> Tensor | None:
    if all(reply.positions is None for reply in replies):
        return None
    positions = torch.arange(longest).repeat(len(replies), 1)
    for row, reply in enumerate(replies):
        if reply.positions is not None:
            positions[row, : len(reply.ids)] = torch.tensor(reply.positions)
    return positions


def _logits(model: PreTrainedModel, ids: Tensor, rows: Tensor, positions: Tensor | None = None) -> Tensor:
    """Logits in float32 of some rows of every sequence; other rows are not computed where the model allows it."""
    known = inspect.signature(model.forward).parameters
    options: dict[str, Any] = {"logits_to_keep": rows} if "logits_to_keep" in known else {}
    if positions is not None and "position_ids" in known:
        # The mask marks the input as one text: without it transformers would split it at the gaps.
        options |= {"position_ids": positions.to(ids.device), "attention_mask": torch.ones_like(ids)}
    with any_length(ids.device):
        logits: Tensor = model(input_ids=ids, use_cache=False, **options).logits
    return (logits if "logits_to_keep" in known else logits[:, rows]).float()
