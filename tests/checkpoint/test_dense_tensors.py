"""Plain floats: biases, norms, and values that do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from exlm.checkpoint import SafetensorsCheckpoint, safetensors_checkpoint
from exlm.errors import BadTensor, MissingTensor
from exlm.spec.tensor_names import LAYER_PREFIX, TensorLocation, TensorNames
from tests.checkpoint.checkpoint_helpers import FLOATS, Q, open_checkpoint, read_tensor, read_weight
from tests.checkpoint.safetensors_bytes import same_bits, write_safetensors


class TestBias:
    """A bias is required exactly if the architecture has one; a bias of zeros is always accepted."""

    def test_a_bias_is_read(self, tmp_path: Path) -> None:
        tensors = {f"{Q}.weight": torch.randn(2, 3), f"{Q}.bias": torch.randn(2).half()}
        weight = read_weight(open_checkpoint(tmp_path, tensors), "layers.0.attn.q", 3, 2, bias=True)
        assert weight.bias is not None
        assert same_bits(weight.bias, tensors[f"{Q}.bias"].float())

    def test_a_bias_may_be_in_another_file(self, tmp_path: Path) -> None:
        write_safetensors(tmp_path, {f"{Q}.weight": torch.randn(2, 3)}, "a-00001-of-00002.safetensors")
        write_safetensors(tmp_path, {f"{Q}.bias": torch.ones(2)}, "a-00002-of-00002.safetensors")
        assert (
            read_weight(SafetensorsCheckpoint(tmp_path, TensorNames()), "layers.0.attn.q", 3, 2, bias=True).bias
            is not None
        )

    def test_it_is_missing(self, tmp_path: Path) -> None:
        checkpoint = open_checkpoint(tmp_path, {f"{Q}.weight": torch.randn(2, 3)})
        with pytest.raises(MissingTensor, match=r"the bias of layers\.0\.attn\.q is missing.*q_proj\.bias"):
            read_weight(checkpoint, "layers.0.attn.q", 3, 2, bias=True)

    def test_an_unexpected_bias_of_zeros_is_dropped(self, tmp_path: Path) -> None:
        checkpoint = open_checkpoint(tmp_path, {f"{Q}.weight": torch.randn(2, 3), f"{Q}.bias": torch.zeros(2)})
        assert read_weight(checkpoint, "layers.0.attn.q", 3, 2).bias is None
        assert checkpoint.unused() == []

    def test_any_other_unexpected_bias_is_refused(self, tmp_path: Path) -> None:
        tensors = {f"{Q}.weight": torch.randn(3, 3), f"{Q}.bias": torch.tensor([0.0, 1.0, float("nan")])}
        with pytest.raises(BadTensor, match=r"q_proj\.bias.*found 2 of 3 not zero"):
            read_weight(open_checkpoint(tmp_path, tensors), "layers.0.attn.q", 3, 3)

    @pytest.mark.parametrize("shape", [(3,), (2, 1), (), (1,)])
    def test_a_bias_of_a_wrong_shape_is_refused(self, tmp_path: Path, shape: tuple[int, ...]) -> None:
        tensors = {f"{Q}.weight": torch.randn(2, 3), f"{Q}.bias": torch.zeros(shape)}
        with pytest.raises(BadTensor, match=r"q_proj\.bias': expected shape \[2\]"):
            read_weight(open_checkpoint(tmp_path, tensors), "layers.0.attn.q", 3, 2, bias=True)


class TestTensor:
    """Norms, embeddings and other tensors that are no matrices to multiply with."""

    @pytest.mark.parametrize("stored", FLOATS)
    @pytest.mark.parametrize("wanted", FLOATS)
    def test_a_tensor_is_cast(self, tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
        data = torch.randn(9).to(stored)
        checkpoint = open_checkpoint(tmp_path, {"model.norm.weight": data})
        assert same_bits(read_tensor(checkpoint, "final_norm", (9,), dtype=wanted), data.to(wanted))

    def test_several_shapes_may_be_accepted(self, tmp_path: Path) -> None:
        key = "model.layers.0.self_attn.q_norm.weight"
        for n, data in enumerate((torch.randn(4), torch.randn(2, 4))):
            checkpoint = open_checkpoint(tmp_path / str(n), {key: data})
            assert same_bits(read_tensor(checkpoint, "layers.0.attn.q_norm", (4,), (2, 4)), data)
        other = open_checkpoint(tmp_path / "other", {key: torch.randn(8)})
        with pytest.raises(BadTensor, match=r"expected shape \[4\] or \[2, 4\] for .*found \[8\]"):
            read_tensor(other, "layers.0.attn.q_norm", (4,), (2, 4))

    def test_a_norm_bias_is_read_by_suffix(self, tmp_path: Path) -> None:
        tensors = {"model.norm.weight": torch.ones(3), "model.norm.bias": torch.randn(3)}
        checkpoint = open_checkpoint(tmp_path, tensors)
        assert same_bits(read_tensor(checkpoint, "final_norm", (3,), suffix="bias"), tensors["model.norm.bias"])
        with pytest.raises(MissingTensor, match=r"the other of final_norm.*model\.norm\.other"):
            read_tensor(checkpoint, "final_norm", (3,), suffix="other")

    def test_rows_and_a_scalar(self, tmp_path: Path) -> None:
        names = TensorNames().with_locations(
            positions=TensorLocation("p", rows=((1, 3),), without_suffix=True), embed=TensorLocation("s")
        )
        data = torch.randn(4, 2)
        checkpoint = open_checkpoint(tmp_path, {"p": data, "s.weight": torch.tensor(2.5)}, names)
        assert same_bits(read_tensor(checkpoint, "positions", (2, 2)), data[1:3])
        assert same_bits(read_tensor(checkpoint, "embed", ()), torch.tensor(2.5))
        short = open_checkpoint(tmp_path / "short", {"p": data[:2]}, names)
        with pytest.raises(BadTensor, match=r"found \[2, 2\]"):
            read_tensor(short, "positions", (2, 2))

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
    def test_a_norm_must_be_finite(self, tmp_path: Path, bad: float) -> None:
        checkpoint = open_checkpoint(tmp_path, {"model.norm.weight": torch.tensor([1.0, bad, 2.0, bad])})
        assert read_tensor(checkpoint, "final_norm", (4,)).shape == (4,)
        with pytest.raises(BadTensor, match=r"'model\.norm\.weight': expected finite values, found 2 of 4"):
            read_tensor(checkpoint, "final_norm", (4,), finite=True)

    @pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool, torch.int64])
    def test_integers_are_refused(self, tmp_path: Path, dtype: torch.dtype) -> None:
        checkpoint = open_checkpoint(tmp_path, {"model.norm.weight": torch.ones(4, dtype=dtype)})
        with pytest.raises(BadTensor, match=r"expected one of the types F16, BF16, F32, F64, found '\w+'"):
            read_tensor(checkpoint, "final_norm", (4,))

    def test_it_is_missing(self, tmp_path: Path) -> None:
        checkpoint = open_checkpoint(tmp_path, {"x": torch.ones(1)})
        with pytest.raises(MissingTensor, match=r"final_norm is missing: expected 'model\.norm\.weight'.*1 tensors"):
            read_tensor(checkpoint, "final_norm", (4,))


class TestOverflow:
    """A value that does not fit the wanted type is an error, not infinity."""

    @pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("transposed", [False, True])
    def test_a_matrix(self, tmp_path: Path, stored: torch.dtype, transposed: bool) -> None:
        data = torch.ones(4, 4).to(stored)
        data[1, 2], data[3, 0], data[0, 0] = 70000.0, -1e9, float("inf")
        names = TensorNames().with_locations(
            attn__q=TensorLocation(LAYER_PREFIX + "self_attn.q_proj", transposed=transposed)
        )
        checkpoint = open_checkpoint(tmp_path, {f"{Q}.weight": data}, names)
        with pytest.raises(BadTensor) as caught:
            read_weight(checkpoint, "layers.0.attn.q", 4, 4, dtype=torch.float16)
        for part in ("2 of 16 values", "float16", "bfloat16 or float32", f"{Q}.weight", "model.safetensors"):
            assert part in str(caught.value)
        assert read_weight(checkpoint, "layers.0.attn.q", 4, 4, dtype=torch.float32).data.isinf().sum() == 1

    def test_the_largest_that_fits(self, tmp_path: Path) -> None:
        checkpoint = open_checkpoint(tmp_path, {"model.norm.weight": torch.tensor([65504.0, -65504.0, 65519.0])})
        assert read_tensor(checkpoint, "final_norm", (3,), dtype=torch.float16, finite=True).isfinite().all()

    def test_an_unexpected_bias_is_checked_without_a_cast(self, tmp_path: Path) -> None:
        tensors = {f"{Q}.weight": torch.ones(2, 2), f"{Q}.bias": torch.tensor([0.0, 1e30])}
        with pytest.raises(BadTensor, match="1 of 2 not zero"):
            read_weight(open_checkpoint(tmp_path, tensors), "layers.0.attn.q", 2, 2, dtype=torch.float16)

    def test_overflow_is_counted_over_all_chunks(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(safetensors_checkpoint, "COPY_CHUNK", 8)
        checkpoint = open_checkpoint(tmp_path, {"model.norm.weight": torch.full((11,), 1e6)})
        with pytest.raises(BadTensor, match="11 of 11 values"):
            read_tensor(checkpoint, "final_norm", (11,), dtype=torch.float16)
