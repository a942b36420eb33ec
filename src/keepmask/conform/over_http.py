"""`HttpTarget`: an engine behind HTTP, whose model is made to have each probe's distribution."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice, permutations

from keepmask.conform.forcing import LIFT, NO_TIES, NotForcedError, Tokens, force, lifted, ties_hold
from keepmask.conform.json_client import CrashedError, RefusedError
from keepmask.conform.mask_routes import Drawn, Route, Word
from keepmask.conform.outcome import Observation, observed
from keepmask.conform.probes import PROBES, Probe
from keepmask.errors import BackendError

__all__ = ["PROMPT", "HttpTarget"]

PROMPT: Tokens = (72, 101, 108, 112)
"""Token ids that every vocabulary has."""

_FEW = 6  # ids among which words and earlier tokens are looked for
_CHARACTERS = range(33, 127)  # ids that are single characters in most vocabularies of bytes
_MAX_TRIES = 6  # choices of ids tried for one probe


class HttpTarget:
    """The sampler of a server.

    prompt: what all contexts begin with. eos_token_id: the model's end-of-sequence token, None where not known.
    """

    def __init__(
        self, name: str, route: Route, *, prompt: Sequence[int] = PROMPT, eos_token_id: int | None = None
    ) -> None:
        self.name = name
        self._route = route
        self._prompt: Tokens = tuple(prompt)
        self._eos_token_id = eos_token_id
        self._raw: dict[tuple[Tokens, Tokens], dict[int, float]] = {}
        self._words: dict[Tokens, Word | None] = {}
        # Repetition penalties would touch ids of the prompt
        likely = [token_id for token_id in route.read(self._prompt, {}) if token_id not in (*prompt, eos_token_id)]
        self._likely = likely
        needed = max(len(probe.wanted) for probe in PROBES)
        if len(likely) < needed:
            raise BackendError(
                f"{name}: {len(likely)} likely ids to work with, and probes need {needed}; give another "
                "--prompt-token-ids, or let the server return 20 logprobs"
            )
        self._check_bias()

    def observe(self, probe: Probe) -> Observation:
        """Force the probe's distribution, draw, and look at the row."""
        if missing := sorted(self._route.unknown & set(probe.params)):
            return Observation(status="untestable", note=f"this API has no {', '.join(missing)}")
        if probe.eos is not None and self._eos_token_id is None:
            return Observation(status="untestable", note="give the model's end token with --eos-token-id")
        try:
            return self._observe(probe)
        except NotForcedError as error:
            return Observation(status="untestable", note=str(error))
        except RefusedError as error:
            return Observation(status="refused", note=str(error))
        except CrashedError as error:
            return Observation(status="failed", note=str(error))

    def _check_bias(self) -> None:
        """Raise BackendError unless log-probabilities follow a bias: the least likely id must come out far ahead."""
        last = self._likely[-1]
        try:
            lifted(self._route, self._prompt, {last: LIFT})
        except NotForcedError as error:
            raise BackendError(
                f"{self.name}: a logit_bias of {LIFT:.0f} on token {last} left others beside it: the server ignores "
                "logit_bias, or returns raw log-probabilities; start it with --logprobs-mode processed_logprobs"
            ) from error

    def _observe(self, probe: Probe) -> Observation:
        came: list[int] | None = None
        for ids, words in islice(self._choices(probe), _MAX_TRIES):
            before = [ids[slot] for slot in probe.output]
            context = (*self._prompt, *(ids[slot] for slot in probe.prompt))
            bias = force(self._route, (*context, *before), ids, probe)
            drawn = self._route.draw(context, self._params(probe, ids, words, bias))
            came = drawn[0].token_ids
            if came[: len(before)] != before:
                continue
            if probe.exact and not ties_hold(self._route, context, bias, ids, probe):
                raise NotForcedError(NO_TIES)
            return _look(drawn, len(before), ids)
        if came is None:
            raise NotForcedError("found no text that /detokenize gives and /tokenize turns back into the same ids")
        raise NotForcedError(f"needs certain tokens before, and the engine drew others: at last {came}")

    def _params(self, probe: Probe, ids: Tokens, words: list[str], bias: dict[int, float]) -> dict[str, object]:
        own = probe.params_for(ids)
        own_bias = own.pop("logit_bias", {})
        params = {
            "temperature": 1.0,
            "top_p": 1.0,
            "min_p": 0.0,
            "n": probe.num_completions,
            "max_tokens": len(probe.output) + 1,
            "ignore_eos": probe.eos is None,
            "logit_bias": {token_id: value + own_bias.get(token_id, 0.0) for token_id, value in bias.items()},
            **own,
        }
        return params | ({"bad_words": words} if words else {})

    def _choices(self, probe: Probe) -> Iterator[tuple[Tokens, list[str]]]:
        """Ids for the slots, and the texts of the bad words; the best choice first."""
        for ids in self._histories(probe) if probe.output else self._handfuls(probe):
            spelled = probe.words_for(ids)
            words = [word for word in map(self._word, map(tuple, spelled)) if word is not None]
            # Engines ban a word behind a space as well, which must be none of the other ids
            others = set(ids).difference(*spelled)
            if len(words) == len(spelled) and not any(others & set(word.spaced) for word in words):
                yield ids, [word.text for word in words]

    def _handfuls(self, probe: Probe) -> Iterator[Tokens]:
        """The likeliest ids, ascending; where there are bad words, any order of a few that can be spelled."""
        size = len(probe.wanted)
        if probe.eos is not None:
            assert self._eos_token_id is not None
            others = iter(self._likely)
            yield tuple(self._eos_token_id if slot == probe.eos else next(others) for slot in range(size))
        elif "bad_words" in probe.params:
            yield from permutations(self._spellable, size)
        else:
            yield tuple(sorted(self._likely[:size]))

    def _histories(self, probe: Probe) -> list[Tokens]:
        """Choices of ids, those first whose earlier tokens come out most surely under the bias of the last position."""
        few = self._spellable if "bad_words" in probe.params else tuple(self._likely[:_FEW])
        return sorted(permutations(few, len(probe.wanted)), key=lambda ids: -self._lead(probe, ids, few))

    def _lead(self, probe: Probe, ids: Tokens, few: Tokens) -> float:
        """Nats by which the tokens before are ahead where it is closest, penalties and bans apart."""
        context = (*self._prompt, *(ids[slot] for slot in probe.prompt))
        history = [ids[slot] for slot in probe.output]
        last = self._logits((*context, *history), few)
        bias = {token_id: math.log(p) - last[token_id] for token_id, p in zip(ids, probe.wanted, strict=True)}
        leads = []
        for k, token_id in enumerate(history):
            logits = self._logits((*context, *history[:k]), few)
            biased = {other: logits[other] + bias[other] for other in ids}
            leads.append(biased.pop(token_id) - max(biased.values()))
        return min(leads)

    def _logits(self, context: Tokens, few: Tokens) -> dict[int, float]:
        """Logits of a few ids behind a context, up to a constant."""
        if (context, few) not in self._raw:
            self._raw[context, few] = lifted(self._route, context, dict.fromkeys(few, LIFT))
        return self._raw[context, few]

    @cached_property
    def _spellable(self) -> Tokens:
        """A few ids with a text of their own: of the likeliest, and where these have none, of single characters."""
        taken = {*self._prompt, self._eos_token_id}
        ids = (token_id for token_id in (*self._likely, *_CHARACTERS) if token_id not in taken)
        return tuple(islice((token_id for token_id in ids if self._word((token_id,))), _FEW))

    def _word(self, token_ids: Tokens) -> Word | None:
        if token_ids not in self._words:
            self._words[token_ids] = self._route.word(token_ids)
        return self._words[token_ids]


def _look(drawn: Sequence[Drawn], position: int, ids: Tokens) -> Observation:
    """What the rows at this output position say."""
    for completion in drawn:
        if len(completion.token_ids) <= position:
            reason, num_tokens = completion.finish_reason, len(completion.token_ids)
            note = f"ended with finish_reason {reason} after {num_tokens} tokens, before the one in question"
            return Observation(status="untestable" if reason == "stop" else "failed", note=note)
    return observed([c.rows[position] for c in drawn], [c.token_ids[position] for c in drawn], ids)
