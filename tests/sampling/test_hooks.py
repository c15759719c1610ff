"""Post-sampling hooks: they see the token in the old shapes and may replace it."""

from __future__ import annotations

import torch

from exlm.sampling import PostSamplingResult, call_hooks


def test_hooks_are_called_in_order_and_may_replace_the_token() -> None:
    seen: list[tuple[int, ...]] = []

    def watch(result: PostSamplingResult) -> None:
        assert result.sampled_prob is not None
        assert result.candidate_tokens is not None
        assert result.logits is not None
        seen.append((*result.sampled_token.shape, *result.candidate_tokens.shape, *result.logits.shape))

    def replace(result: PostSamplingResult) -> None:
        result.sampled_token = torch.tensor([[9]])
        result.feed_filters = False

    def insist(result: PostSamplingResult) -> None:
        assert result.token == 9
        result.sampled_token = 4

    result = call_hooks([watch, replace, insist], 7, 0.5, ([7, 8], [0.5, 0.25]), torch.zeros(30))
    assert seen == [(1, 1, 1, 1, 2, 1, 1, 30)]
    assert result.token == 4
    assert not result.feed_filters


def test_without_hooks_the_token_stays() -> None:
    result = call_hooks([], 7, 0.5)
    assert result.token == 7
    assert result.feed_filters
    assert result.candidate_tokens is None
    assert result.candidate_probs is None
    assert result.logits is None
