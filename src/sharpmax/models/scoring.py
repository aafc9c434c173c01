"""Score a language model: the loss of a given reply, and whether greedy decoding gives it."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
    positions: tuple[int, ...] | None = None
    """The positions of the tokens; None: consecutive."""

    times: tuple[int, ...] | None = None
    """The number of copies of each token's key, with gaps in the positions for the copies; None: one."""

    @property
    def tokens(self) -> int:
        """The number of tokens of the answer."""
        return len(self.ids) - self.start


@dataclass(frozen=True)
class Judged:
    """The score of a reply: its summed loss in nats, and whether greedy decoding gives exactly this answer."""

    nll: float
    tokens: int
    right: bool


def token_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The tokens of a whole input, with special tokens unless a chat template has put them into the text."""
    ids: list[int] = tokenizer(text, add_special_tokens=tokenizer.chat_template is None).input_ids
    return ids


def encode(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, before: str = "") -> Reply:
    """The prompt as one turn of a chat, or as plain text without a chat template; `before` precedes its text."""
    check_tokenizer(tokenizer)
    if not isinstance(prompt, Prompt):
        reject_type("prompt", type(prompt).__name__, "a Prompt", "make some: get_task('kv').prompts(8, 1, seed=0)")
    asked = asked_with(tokenizer, prompt, before)
    read, whole = token_ids(tokenizer, asked), token_ids(tokenizer, asked + prompt.answer)
    # A tokenizer may merge the end of the opening with the answer; the answer then begins with the merged token.
    start = next((i for i, (a, b) in enumerate(zip(read, whole, strict=False)) if a != b), min(len(read), len(whole)))
    return Reply(tuple(whole), start)


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The special tokens that a tokenizer adds before and after a text."""
    bare, whole = tokenizer("a", add_special_tokens=False).input_ids, tokenizer("a").input_ids
    start = next((at for at in range(len(whole)) if whole[at : at + len(bare)] == bare), 0)
    return whole[:start], whole[start + len(bare) :]


def asked_with(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, before: str = "") -> str:
    """The text of a prompt up to its answer."""
    user = before + prompt.user
    if tokenizer.chat_template is None:
        return f"{user}\n{prompt.opening}"
    chat = [{"role": "user", "content": user}]
    return f"{tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)}{prompt.opening}"


def batches(replies: Sequence[Reply], most_tokens: int, most_rows: int | None = None) -> Iterator[list[int]]:
    """Indices of replies in batches of up to `most_tokens` tokens; replies of similar length need little padding.

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
    rows: Tensor  # the index before each place, whose logits predict its token
    wanted: Tensor  # `[replies, places]`: the tokens, −100 where a reply has none to predict
    positions: Tensor | None

    @classmethod
    def of(cls, replies: Sequence[Reply], device: torch.device, most: int | None = None, seed: str = "") -> Places:
        """All tokens of the answers, or `most` places of them at random.

        Shorter replies are padded on the right, where causal attention does not see the padding.
        """
        longest = max(len(reply.ids) for reply in replies)
        ids = torch.zeros(len(replies), longest, dtype=torch.long)
        target = torch.full((len(replies), longest), _IGNORED)
        positions = torch.arange(longest).repeat(len(replies), 1)
        for row, reply in enumerate(replies):
            ids[row, : len(reply.ids)] = torch.tensor(reply.ids)
            target[row, reply.start : len(reply.ids)] = torch.tensor(reply.ids[reply.start :])
            if reply.positions is not None:
                positions[row, : len(reply.ids)] = torch.tensor(reply.positions)
        places = (target != _IGNORED).any(0).nonzero()[:, 0]
        if most is not None and len(places) > most:
            places = torch.tensor(sorted(random.Random(seed).sample(places.tolist(), most)))
        apart = any(reply.positions is not None for reply in replies)
        wanted = target[:, places].to(device)
        return cls(ids.to(device), (places - 1).to(device), wanted, positions.to(device) if apart else None)

    @property
    def count(self) -> int:
        """The number of predicted tokens."""
        return int((self.wanted != _IGNORED).sum())

    def logits(self, model: PreTrainedModel) -> Tensor:
        """Logits `[replies, places, vocabulary]` in float32; other logits are not computed if the model allows it."""
        known = inspect.signature(model.forward).parameters
        options: dict[str, Any] = {"logits_to_keep": self.rows} if "logits_to_keep" in known else {}
        if self.positions is not None and "position_ids" in known:
            # The mask marks the input as one text: without it transformers would split it at the gaps.
            options |= {"position_ids": self.positions, "attention_mask": torch.ones_like(self.ids)}
        with any_length(self.ids.device):
            logits: Tensor = model(input_ids=self.ids, use_cache=False, **options).logits
        return (logits if "logits_to_keep" in known else logits[:, self.rows]).float()

    def losses(self, logits: Tensor) -> Tensor:
        """Loss in nats of each token, `[replies, places]`; 0 where there is none."""
        nll = F.cross_entropy(logits.flatten(0, 1), self.wanted.flatten(), ignore_index=_IGNORED, reduction="none")
        return nll.view_as(self.wanted)

    def divergences(self, baseline: Tensor, logits: Tensor) -> Tensor:
        """KL(baseline ‖ now) in nats of each prediction, `[replies, places]`; 0 where there is none."""
        before, after = baseline.log_softmax(-1), logits.log_softmax(-1)
        return (before.exp() * (before - after)).sum(-1) * (self.wanted != _IGNORED)


def reply_losses(model: PreTrainedModel, replies: Sequence[Reply]) -> tuple[Tensor, Tensor]:
    """Loss in nats and correctness of each token of the answers, `[replies, places]`; 0 and True for padding."""
    places = Places.of(replies, model.device)
    logits = places.logits(model)
    right = (logits.detach().argmax(-1) == places.wanted) | (places.wanted == _IGNORED)
    return places.losses(logits), right


def judge(model: PreTrainedModel, replies: Sequence[Reply], most_tokens: int = 16_384) -> list[Judged]:
    """Score each reply in one forward pass.

    Greedy decoding gives an answer if and only if each of its tokens is the most likely one after the preceding tokens.
    """
    if not isinstance(model, nn.Module):
        reject_type("model", type(model).__name__, "a causal language model of transformers")
    wrong = [type(one).__name__ for one in replies if not isinstance(one, Reply)]
    if wrong:
        reject_type("replies", f"a {wrong[0]}", "results of `encode`")
    judged: dict[int, Judged] = {}
    with torch.no_grad():
        for batch in batches(replies, most_tokens):
            nll, right = reply_losses(model, [replies[i] for i in batch])
            for i, loss, good in zip(batch, nll.sum(-1).tolist(), right.all(-1).tolist(), strict=True):
                judged[i] = Judged(loss, replies[i].tokens, good)
    return [judged[i] for i in range(len(replies))]


def window_losses(model: PreTrainedModel, windows: Sequence[Sequence[int]]) -> Tensor:
    """Mean loss in nats per token of each window of plain text, all of one length."""
    return reply_losses(model, [Reply(tuple(window), 1) for window in windows])[0].mean(-1)


def sampled_texts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, count: int, length: int, seed: int
) -> list[list[int]]:
    """Texts of `length` tokens sampled from the model at temperature 1, each starting with a random word.

    They represent the training data of the model.
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
            # Random numbers come from the CPU, so that they are the same on every device; logits are not copied.
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
    asked = [token_ids(tokenizer, asked_with(tokenizer, Prompt(one, "", ""))) for one in questions]
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
    """The answers to questions by greedy decoding of up to `new_tokens` tokens, or until the token `end`.

    By default an answer ends at the end tokens of the model's configuration. `complete` is a stopping criterion of
    transformers, which returns the answers that are complete.
    """
    longest = max(map(len, asked))
    ids = torch.zeros(len(asked), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, one in enumerate(asked):  # padded on the left, so that the answer follows the question
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
    lengths = (next((i + 1 for i, token in enumerate(answer) if token in stops), len(answer)) for answer in answers)
    return [Reply((*one, *answer[:n]), len(one)) for one, answer, n in zip(asked, answers, lengths, strict=True)]


def generated_texts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    new_tokens: int,
    most_tokens: int = 65_536,
) -> list[str]:
    """The text that greedy decoding adds to the opening of each prompt, until it contains all references."""
    asked = [Reply(tuple(token_ids(tokenizer, asked_with(tokenizer, one))), 0) for one in prompts]
    answers: dict[int, list[int]] = {}
    for batch in batches(asked, most_tokens):
        start = len(asked[batch[-1]].ids)

        def complete(ids: Tensor, scores: Tensor, batch: list[int] = batch, start: int = start, **_: Any) -> Tensor:
            texts = tokenizer.batch_decode(ids[:, start:], skip_special_tokens=True)
            pairs = zip(texts, (prompts[i].references for i in batch), strict=True)
            done = [all(one.lower() in text.lower() for one in references) for text, references in pairs]
            return torch.tensor(done, device=ids.device)

        replies = generated(model, [asked[i].ids for i in batch], new_tokens, complete=complete)
        answers |= {i: list(one.ids[one.start :]) for i, one in zip(batch, replies, strict=True)}
    return tokenizer.batch_decode([answers[i] for i in range(len(prompts))], skip_special_tokens=True)
