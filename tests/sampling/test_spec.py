"""A sampler that cannot work is refused when it is made, by name, with the rule and the remedy."""

import pytest

from keepmask.errors import ConfigError
from keepmask.sampling import Sampler, SamplerSpec


class Identity:
    preserves_relative_weights = True

    def apply(self, logits, context):
        return logits


class Undeclared:
    def apply(self, logits, context):
        return logits


class NoApply:
    preserves_relative_weights = True


class OddReplay(Identity):
    replay = 3


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"eos_token_ids": (8,)}, r"eos_token_ids: 8 .* \[0, 8\)"),
        ({"banned_token_ids": (-1,)}, r"banned_token_ids: -1 .* \[0, 8\)"),
        ({"banned_token_ids": tuple(range(8))}, "leave at least one"),
        ({"thinking_start_token_ids": (1,)}, "give both or neither"),
        ({"thinking_start_token_ids": (1,), "thinking_end_token_ids": (9,)}, "thinking_end_token_ids: 9"),
        ({"return_sampling_mask": True}, "set logprobs_mode='processed_logprobs'"),
        ({"processors": (NoApply(),)}, "NoApply has no method apply"),
        ({"processors": (Undeclared(),)}, "Undeclared.preserves_relative_weights must be True or False"),
        ({"processors": (OddReplay(),)}, "OddReplay.replay must be a method"),
        (
            {
                "processors": (Identity(),),
                "contract": "vllm",
                "return_sampling_mask": True,
                "logprobs_mode": "processed_logprobs",
            },
            "sampling_mask_contract='exact'",
        ),
    ],
)
def test_what_cannot_work_is_refused(fields, told):
    with pytest.raises(ConfigError, match=told):
        SamplerSpec(**{"vocab_size": 8} | fields)


def test_contract_exact_takes_processors_with_masks():
    SamplerSpec(vocab_size=8, processors=(Identity(),), return_sampling_mask=True, logprobs_mode="processed_logprobs")


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ConfigError, match="impl='quick': must be"):
        Sampler(SamplerSpec(vocab_size=8), impl="quick")
