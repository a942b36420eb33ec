"""A logits processor that says what is drawn, so that a random model ends where a test wants it to."""

from __future__ import annotations

import torch


class Script:
    """Forces the tokens of scripts[first token of the prompt], one a position; other requests go as they go.

    An entry may be an exception to raise, or a float to put into the logits, instead of a token.
    """

    preserves_relative_weights = True

    def __init__(self, scripts):
        self.scripts = scripts

    def apply(self, logits, context):
        script = self.scripts.get(int(context.prompt_token_ids[0]))
        if script is None or context.output_token_ids.size >= len(script):
            return logits
        entry = script[context.output_token_ids.size]
        if isinstance(entry, Exception):
            raise entry
        if isinstance(entry, float):
            logits[7] = entry
            return logits
        forced = torch.full_like(logits, -torch.inf)
        forced[entry] = logits[entry]
        return forced
