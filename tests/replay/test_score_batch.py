"""One call from a model to the scores of a batch, against each sequence's own forward, drawn by the oracle."""

import numpy as np
import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

import oracle
from keepmask import MaskError, SamplingMask, SamplingParams
from keepmask.outputs import Rollout
from keepmask.replay import Head, ReplayBatch, ScoreOptions, score, score_padded

V = 50
PARAMS = {
    "temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": 0.3,
    "logit_bias": {2: 1.0},
}  # fmt: skip


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=V, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, final_logit_softcapping=4.0, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = Gemma2ForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.4)
    return model


def draw(model, prompt, num_tokens, params, seed):
    """A rollout of the model drawn by the oracle: a list of turns where `prompt` is a list of prompts to add."""
    output, rows, logprobs = [], [], []
    settings = SamplingParams(**params)
    for _ in range(num_tokens):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *output]]), use_cache=False).logits[0, -1].numpy()
        step = oracle.step(logits, settings, prompt, output, seed=seed)
        rows.append([] if step.support is None else step.support.tolist())
        logprobs.append(step.logprobs[list(step.ids).index(step.token_id)])
        output.append(step.token_id)
    return Rollout(
        prompt_token_ids=np.array(prompt, np.int32),
        token_ids=np.array(output, np.int32),
        sampling_mask=SamplingMask.from_lists(rows),
        logprobs=np.array(logprobs, np.float32),
        sampling_params=params,
    )


@pytest.fixture(scope="module")
def rollouts(model):
    """Three sequences, the last one of two turns."""
    first, second = draw(model, [5, 9], 6, PARAMS, 0), draw(model, [7, 1, 3, 4], 3, {"top_k": 5}, 1)
    turn = draw(model, [8], 4, PARAMS, 2)
    after = draw(model, [8, *turn.token_ids.tolist(), 3, 3], 5, PARAMS, 3)
    return [first, second, [turn, after]]


@pytest.fixture(scope="module")
def batch(rollouts):
    return ReplayBatch.pack(rollouts, vocab_size=V)


def hidden_of(model, inputs):
    return model.model(**inputs).last_hidden_state


def test_packed_padded_and_chosen_states_give_the_engines_log_probabilities(model, batch):
    head = Head.of(model)
    packed, padded = (hidden_of(model, inputs) for inputs in (batch.packed(), batch.padded().inputs()))
    chosen = packed[0][batch.logit_positions]
    for hidden in (packed, packed[0], padded, chosen):
        scores = score(batch, hidden, head, entropy="value")
        torch.testing.assert_close(scores.logprobs, batch.rollout_logprobs, rtol=0, atol=2e-5)
        assert scores.entropy is not None


def test_sequences_of_a_packed_forward_do_not_see_each_other(model, batch):
    packed = batch.packed()
    assert packed["use_cache"] is False
    alone = [hidden_of(model, part.packed()) for part in batch.split(max(batch.lengths))]
    torch.testing.assert_close(hidden_of(model, packed), torch.cat(alone, 1), rtol=0, atol=1e-5)
    seen = hidden_of(model, packed | {"use_cache": True})
    assert (score(batch, seen, Head.of(model)).logprobs - batch.rollout_logprobs).abs().max() > 0.1


def test_the_loss_mask_of_the_batch_is_used(model, rollouts):
    masks = [np.arange(6) % 2, np.zeros(3), np.ones(9)]
    batch = ReplayBatch.pack(rollouts, vocab_size=V, loss_masks=masks)
    scores = score(batch, hidden_of(model, batch.packed()), Head.of(model))
    torch.testing.assert_close(scores.logprobs, batch.rollout_logprobs * batch.loss_mask, rtol=0, atol=2e-5)


def test_options_and_references_pass_through(model, batch):
    hidden, head = hidden_of(model, batch.packed()), Head.of(model)
    own = score(batch, hidden, head, options=ScoreOptions(impl="gather"))
    again = score(batch, hidden, head, ref_member_logprobs=own.member_logprobs, full_log_normalizer=True)
    torch.testing.assert_close(again.kl, torch.zeros_like(again.kl), rtol=0, atol=1e-6)
    assert (again.kept_mass <= 1).all()
    assert score(batch, hidden, head, options=ScoreOptions(members=False)).member_logprobs is None


def test_what_is_not_the_batchs_own_is_refused(model, batch):
    head, hidden = Head.of(model), hidden_of(model, batch.packed())
    with pytest.raises(
        MaskError, match=r"neither of packed tokens, \[1, 27, E\], nor of padded ones, \[3, 12, E\], nor"
    ):
        score(batch, hidden[:, 1:], head)
    with pytest.raises(TypeError, match=r"must be a replay\.Head, got Parameter"):
        score(batch, hidden, model.lm_head.weight)
    with pytest.raises(MaskError, match="head has 49 rows, the batch was packed with vocab_size=50"):
        score(batch, hidden, Head(head.weight[:49]))


def padded_tensors(batch, left):
    """input_ids, attention mask and the flags of drawn tokens as a trainer holds them."""
    padded = batch.padded()
    drawn = padded.to_tokens(torch.ones(batch.num_rows)).long()
    tensors = [padded.input_ids, padded.attention_mask, drawn]
    if left:
        width = max(batch.lengths)
        tensors = [
            torch.stack([row.roll(width - length) for row, length in zip(t, batch.lengths, strict=True)])
            for t in tensors
        ]
    return tensors


@pytest.mark.parametrize("left", [True, False])
def test_padded_scores_stand_at_the_drawn_tokens(model, rollouts, batch, left):
    input_ids, attention_mask, drawn = padded_tensors(batch, left)
    positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
    hidden = model.model(input_ids, attention_mask=attention_mask, position_ids=positions).last_hidden_state
    turns = [item if isinstance(item, list) else [item] for item in rollouts]
    masks = [SamplingMask.concat([turn.sampling_mask for turn in item]) for item in turns]
    params = [item[0].sampling_params for item in turns]
    got = score_padded(
        hidden, Head.of(model), input_ids, masks, drawn,
        sampling_params=params, attention_mask=attention_mask, entropy="grad",
    )  # fmt: skip
    assert got.logprobs.shape == got.entropy.shape == input_ids.shape
    torch.testing.assert_close(got.logprobs[drawn.bool()], batch.rollout_logprobs, rtol=0, atol=2e-5)
    assert not got.logprobs[~drawn.bool()].any()
    assert not got.entropy[~drawn.bool()].any()
    got.logprobs.sum().backward()
    assert model.lm_head.weight.grad.abs().sum() > 0
    model.zero_grad()


def test_padded_scores_refuse_what_does_not_fit(model, rollouts, batch):
    input_ids, _, drawn = padded_tensors(batch, False)
    hidden, head = torch.zeros(*input_ids.shape, 16), Head.of(model)
    masks = [SamplingMask.from_lists([[5]] * int(row.sum())) for row in drawn]
    with pytest.raises(MaskError, match=r"must be \[B, S, E\], \[B, S\] and \[B, S\]"):
        score_padded(hidden[:, 1:], head, input_ids, masks, drawn, sampling_params={})
    with pytest.raises(MaskError, match="2 masks and 3 sampling_params for 3 sequences"):
        score_padded(hidden, head, input_ids, masks[:2], drawn, sampling_params={})
    with pytest.raises(MaskError, match="attention_mask: needed where penalties"):
        score_padded(hidden, head, input_ids, masks, drawn, sampling_params={"presence_penalty": 0.5})
    with pytest.raises(MaskError, match="no state comes before it"):
        score_padded(hidden, head, input_ids, masks, torch.ones_like(drawn), sampling_params={})
    with pytest.raises(MaskError, match=r"3 rows for 6 sampled tokens"):
        score_padded(hidden, head, input_ids, [masks[1], *masks[1:]], drawn, sampling_params={})
