"""Quantisation step by step: calibrate, measure sensitivity, allocate bits, solve, write, report.

`run` calls the steps in this order. Every step saves its results in the step store and takes up what is there
already, so a job that was killed continues after its last finished step and ends with the same bytes. One
layer of the model is in memory at a time. The store has, by the name of the constant:

    IDS               ids           token ids (rows, length)
    STATES            state.N       the float model's hidden states before layer N, by batch; then deleted
    STATE_GRADIENTS   slope.N       the gradients of -log p(sampled token) there; deleted once used
    OUTPUT_GRADIENTS  gradients.N   of layer N, by role: output Hessian G, and `ROLE|care` token weights;
                                    gradients.head
    SENSITIVITY       profile.ROLE  a matrix's KL costs (JSON)
    MEASURED          listened      the backward pass is complete (JSON)
    RETRY_TARGET      aim           the KL cost to aim at in the second try for max_kld (JSON)
    HIDDEN_STATES     streams.N     both models' hidden states before layer N
    SOLVED            layer.N       the quantised tensors of layer N, `ROLE|NAME`; error and bits (JSON);
                                    layer.head

Jobs are continued across versions: these names, and those of the tensors, are a file format.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import spec
from ..checkpoint import WeightSource
from ..config import Config, FrozenConfig
from ..convert.plan import ConversionPlan
from ..errors import InputError
from ..formats import PackedWeight, exl2
from ..formats import gptq as gptq_format
from ..formats.host_buffers import trim_heap
from ..nn import Batch
from ..spec.model import Matrix, matrices
from ..version import __version__
from . import sensitivity
from .allocation import HEAD_RECIPES, Recipe, min_kl_cost, minimize_bits, minimize_kl, quantized_matrices
from .calibration import make_calibration_ids
from .cuda_graphs import GRAPHS
from .evaluate import Quality, evaluate_model, write_report
from .gptq import factorize
from .layer_loader import HookedLinear, LayerLoader, make_batch, run_block
from .layer_solver import (
    HiddenStates,
    accumulate_clusters,
    cluster_columns,
    cluster_count,
    propagate,
    solve_head,
    solve_layer,
)
from .matrix_solver import solve_exl2, solve_gptq
from .options import QuantizeOptions, calibration_name
from .output import MODEL_CARD, conversion_plan, unquantized_bytes, write_model
from .sensitivity import Measurement, Sensitivity, parse_sensitivity
from .step_store import StepStore, damaged_step

log = logging.getLogger(__name__)

PASS_TOKENS = 4096
"""Tokens that go through a layer together."""

IDS, SENSITIVITY, MEASURED, RETRY_TARGET = "ids", "profile", "listened", "aim"
STATES, STATE_GRADIENTS, OUTPUT_GRADIENTS = "state", "slope", "gradients"
HIDDEN_STATES, SOLVED = "streams", "layer"

FORWARD_UNITS, BACKWARD_UNITS, SOLVE_UNITS, HEAD_UNITS = 1, 6, 12, 12
"""Units of the progress bar, in proportion to the time that steps take."""

TOKEN_WEIGHTS = "|care"
"""Suffix of a role among the OUTPUT_GRADIENTS: the tokens' weights at that matrix."""

GPTQ_DAMPING = 0.02
"""The least damping for the GPTQ format: with a single width, GPTQ overfits short calibration text sooner."""

RETRY_MARGIN = 0.9
"""The second try for max_kld aims this far below what the first try's miss calls for."""


Progress = Callable[[int, int, str], object]
"""(units done, units in all, what is being done)."""


@dataclass
class QuantContext:
    """The source, the configuration, the step store and the progress of one job."""

    model_config: Config
    frozen: FrozenConfig
    source: WeightSource
    loader: LayerLoader
    store: StepStore
    options: QuantizeOptions
    progress: Progress
    done: int = 0
    total: int = 1

    @property
    def model(self) -> spec.Model:
        """The source model."""
        return self.frozen.spec

    @property
    def depth(self) -> int:
        """The number of layers."""
        return len(self.model.layers)

    @property
    def matrices(self) -> dict[str, Matrix]:
        """The matrices to quantise, by role; the head only for EXL2."""
        found = {m.role: m for m in quantized_matrices(self.model)}
        if self.options.method == "exl2":
            found["head"] = next(m for m in matrices(self.model) if m.role == "head")
        return found

    @property
    def linears(self) -> dict[str, HookedLinear]:
        """The matrices to quantise that the loader has in memory, by role, in the order of use."""
        loaded = self.loader.linears
        return {role: loaded[role] for role in self.matrices if role in loaded}

    @property
    def num_weights(self) -> int:
        """The weights that bits are allocated to."""
        return sum(m.in_features * m.out_features for m in quantized_matrices(self.model))

    @property
    def plan(self) -> ConversionPlan:
        """How everything in the source gets into the new folder."""
        return conversion_plan(self.frozen, self.source, self.matrices.keys())

    @property
    def fixed_bits(self) -> int:
        """The bits of everything that none are allocated to: the head, and what is not quantised."""
        head = HEAD_RECIPES[self.options.head_bits].bits(self.matrices["head"])
        return head + 8 * unquantized_bytes(self.plan, self.model, self.matrices.keys())

    def report_progress(self, units: int, what: str) -> None:
        """Report so many more units of progress, and return freed memory to the system."""
        trim_heap()
        self.done += units
        self.progress(min(self.done, self.total), self.total, what)

    def file_tensors(self, role: str, weight: PackedWeight) -> dict[str, Tensor]:
        """A quantised matrix's tensors by their names in the new model."""
        location = self.model.names.own_location(role)
        tensors = exl2.write(weight) if self.options.method == "exl2" else gptq_format.write(weight)
        return {location.tensor_key(suffix): tensor for suffix, tensor in tensors.items()}


@dataclass(frozen=True)
class OutputOptions:
    """Where the model goes, and how it is written."""

    folder: Path
    shard_bytes: int
    overwrite: bool
    report: bool


def run(
    ctx: QuantContext, existing: Measurement | None, save_measurement: Path | None, output: OutputOptions
) -> Quality | None:
    """All steps. `existing` is a measurement made before. Returns the report's figures, if it is made."""
    batches = calibrate(ctx)
    measurement = None
    if ctx.options.method == "exl2":
        measurement = measure_sensitivity(ctx, batches, existing)
        if save_measurement is not None:
            measurement.save(save_measurement)
    while True:
        recipes = {} if measurement is None else allocate_bits(ctx, measurement)
        solve_layers(ctx, batches, recipes)
        try:
            with write(ctx, output) as folder:
                return report(ctx, output, folder)
        except _TargetMissed as missed:
            log.info("%s: %s", output.folder.name, missed)


class _TargetMissed(Exception):
    """The model diverges by more than max_kld; it is discarded and made once again with more bits."""


def progress_units(depth: int, exl2: bool) -> int:
    """Units of a whole job."""
    return depth * ((FORWARD_UNITS + BACKWARD_UNITS if exl2 else 0) + SOLVE_UNITS) + 2 * HEAD_UNITS


# -- 1. calibrate ----------------------------------------------------------------------------------


def calibrate(ctx: QuantContext) -> list[Batch]:
    """The calibration text as forward passes of about PASS_TOKENS tokens."""
    ids = calibration_ids(ctx)
    rows = max(1, PASS_TOKENS // ids.shape[1])
    device = ctx.loader.device
    return [make_batch(ids[a : a + rows].to(device)) for a in range(0, len(ids), rows)]


def calibration_ids(ctx: QuantContext) -> Tensor:
    """(rows, length) token ids, made once per job."""
    if not ctx.store.has(IDS):
        ctx.store.save(IDS, {"ids": make_calibration_ids(ctx.model_config, ctx.options, ctx.loader)})
    return ctx.store.load(IDS)["ids"]


# -- 2. measure sensitivity ------------------------------------------------------------------------


@torch.no_grad()
def measure_sensitivity(ctx: QuantContext, batches: list[Batch], existing: Measurement | None) -> Measurement:
    """One forward and one backward pass, layer by layer: output Hessians, token weights, KL costs by width.

    An `existing` measurement replaces the KL costs; the solver needs the Hessians and weights all the same.
    """
    store, depth = ctx.store, ctx.depth
    ctx.report_progress(0, "measuring")
    if store.load_json(MEASURED):
        ctx.report_progress(depth * (FORWARD_UNITS + BACKWARD_UNITS), "measuring")
        return existing or _saved_measurement(ctx)
    start = next((i for i in range(depth + 1) if store.has(f"{STATE_GRADIENTS}.{i}")), depth)
    grads = (
        store.load(f"{STATE_GRADIENTS}.{start}")
        if store.has(f"{STATE_GRADIENTS}.{start}")
        else _head_grads(ctx, batches)
    )
    ctx.report_progress(depth * FORWARD_UNITS + (depth - start) * BACKWARD_UNITS, "measuring")
    for i in reversed(range(start)):
        grads = _backward_layer(ctx, batches, i, grads, measure=existing is None)
        ctx.report_progress(BACKWARD_UNITS, f"measuring layer {i}")
    store.save_json(MEASURED, True)
    store.delete(f"{STATE_GRADIENTS}.0", f"{STATES}.0")
    return existing or _saved_measurement(ctx)


def _batches_by_key(batches: list[Batch]) -> dict[str, Batch]:
    """The batches by their keys in the step store."""
    return {f"{i:04}": batch for i, batch in enumerate(batches)}


def _head_grads(ctx: QuantContext, batches: list[Batch]) -> dict[str, Tensor]:
    """The gradients behind the last layer, by batch; saves the tokens' weights for the head's clusters."""
    states, head = _forward_pass(ctx, batches), ctx.loader.load_head()
    membership = _head_clusters(ctx)
    grads, weights = {}, []
    for i, (key, batch) in enumerate(_batches_by_key(batches).items()):
        generator = torch.Generator().manual_seed(ctx.options.seed + i)
        x = states[key].to(batch.ids.device)
        grads[key], own = sensitivity.head_grad(head, x, batch, generator, membership)
        weights.append(own.flatten(0, 1))
    ctx.store.save(f"{OUTPUT_GRADIENTS}.head", {f"head{TOKEN_WEIGHTS}": torch.cat(weights)})
    ctx.store.save(f"{STATE_GRADIENTS}.{ctx.depth}", grads)
    return grads


def _forward_pass(ctx: QuantContext, batches: list[Batch]) -> dict[str, Tensor]:
    """The float model's hidden states behind the last layer, by batch; those before each layer are saved."""
    store = ctx.store
    start = max((i for i in range(ctx.depth + 1) if store.has(f"{STATES}.{i}")), default=0)
    if store.has(f"{STATES}.{start}"):
        states = store.load(f"{STATES}.{start}")
    else:
        embedding = ctx.loader.load_embedding()
        states = {key: embedding.forward(b) for key, b in _batches_by_key(batches).items()}
        store.save(f"{STATES}.0", states)
    for layer in range(start, ctx.depth):
        block = ctx.loader.load_layer(layer)
        for key, b in _batches_by_key(batches).items():
            states[key] = run_block(block, states[key].to(b.ids.device), b)
        if not all(bool(torch.isfinite(x).all()) for x in states.values()):
            raise InputError(
                f"layers.{layer}: the source model's outputs hold NaN or infinity on the calibration text. "
                "Calibrate with other text, or check the source model with `exlm eval`."
            )
        store.save(f"{STATES}.{layer + 1}", states)
    return states


def _backward_layer(
    ctx: QuantContext, batches: list[Batch], layer: int, grads: dict[str, Tensor], *, measure: bool
) -> dict[str, Tensor]:
    """The gradients before a layer from those behind it; saves what its matrices' hooks found."""
    store, solver = ctx.store, ctx.options.solver
    block = ctx.loader.load_layer(layer)
    hooks = sensitivity.FisherHooks(ctx.linears)
    states, before = store.load(f"{STATES}.{layer}"), {}
    for key, batch in _batches_by_key(batches).items():
        device = batch.ids.device
        grad = grads[key].to(device, copy=True)  # in fresh memory: alignment can change the last bits of sums
        before[key] = sensitivity.vjp(block, states[key].to(device), batch, grad)
    saved = {}
    for role, stats in hooks.stats.items():
        if stats.gradient_sum.dim() == 2:
            saved[role] = (stats.gradient_sum / stats.gradient_sum.diagonal().mean().clamp(min=1e-30)).half()
        if ".experts." not in role:
            saved[f"{role}{TOKEN_WEIGHTS}"] = torch.cat(stats.token_weights)
        if measure:
            w = ctx.loader.linears[role].weight.T.contiguous()
            costs = sensitivity.measure_matrix(w, stats, solver.damping, solver.output_damping, role)
            store.save_json(f"{SENSITIVITY}.{role}", costs.to_json())
    store.save(f"{OUTPUT_GRADIENTS}.{layer}", saved)
    store.save(f"{STATE_GRADIENTS}.{layer}", before)
    store.delete(f"{STATE_GRADIENTS}.{layer + 1}", f"{STATES}.{layer + 1}")
    return before


def _saved_measurement(ctx: QuantContext) -> Measurement:
    """The measurement from the saved sensitivities."""
    sensitivities: dict[str, Sensitivity] = {}
    roles = [m.role for m in quantized_matrices(ctx.model)]
    for role in roles:
        raw = ctx.store.load_json(f"{SENSITIVITY}.{role}")
        if raw is not None:
            path = ctx.store.folder / f"{SENSITIVITY}.{role}.json"
            try:
                sensitivities[role] = parse_sensitivity(raw, path, role)
            except InputError as error:
                raise damaged_step(path, error) from error
    for role in roles:
        if role not in sensitivities:
            sensitivities[role] = _sibling_sensitivity(role, sensitivities)
    return Measurement.from_sensitivities(sensitivities, ctx.model)


def _sibling_sensitivity(role: str, sensitivities: Mapping[str, Sensitivity]) -> Sensitivity:
    """The sensitivity of an expert that no token was routed to: that of another expert of its layer."""
    before, _, rest = role.partition(".experts.")
    part = rest.rpartition(".")[2]
    for other, costs in sensitivities.items():
        if other.startswith(f"{before}.experts.") and other.endswith(f".{part}"):
            return costs
    raise InputError(f"{role}: no token of the calibration text reached it. Calibrate with more text.")


# -- 3. allocate bits ------------------------------------------------------------------------------


def allocate_bits(ctx: QuantContext, measurement: Measurement) -> dict[str, Recipe]:
    """The recipe of every matrix, by role: the least KL cost for a budget, or the fewest bits for max_kld."""
    options, candidate_sets = ctx.options, measurement.candidate_sets
    if options.max_kld is not None:
        if not measurement.sensitivities:
            raise InputError("max_kld needs a measurement by exlm: exllamav2's has no KL divergence in it.")
        target = _retry_target(ctx)
        limit = max(target, min_kl_cost(candidate_sets)) if target else options.max_kld
        allocation = minimize_bits(candidate_sets, limit)
    elif options.bits is not None:
        allocation = minimize_kl(candidate_sets, int(ctx.num_weights * options.bits), ctx.num_weights)
    else:
        assert options.size is not None
        allocation = minimize_kl(candidate_sets, 8 * options.size - ctx.fixed_bits, ctx.num_weights)
    recipes = {role: recipe for candidate in allocation.chosen for role, recipe in candidate.recipes.items()}
    return recipes | {"head": HEAD_RECIPES[options.head_bits]}


def _retry_target(ctx: QuantContext) -> float | None:
    """The KL cost to aim at in the second try; None in the first."""
    saved = ctx.store.load_json(RETRY_TARGET)
    try:
        return float(saved["harm"]) if saved is not None and saved["wanted"] == ctx.options.max_kld else None
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise damaged_step(ctx.store.folder / f"{RETRY_TARGET}.json", repr(error)) from error


# -- 4. solve layer by layer -----------------------------------------------------------------------


@torch.no_grad()
def solve_layers(ctx: QuantContext, batches: list[Batch], recipes: Mapping[str, Recipe]) -> None:
    """Every layer in turn on the outputs of the quantised layers before it, then the head."""
    store, loader = ctx.store, ctx.loader
    saved = [i for i in range(ctx.depth + 1) if store.has(f"{HIDDEN_STATES}.{i}")]
    if saved:
        start = saved[-1]
        states = HiddenStates.from_tensors(store.load(f"{HIDDEN_STATES}.{start}"), batches)
        ctx.report_progress(SOLVE_UNITS * start, "quantising")
    else:
        embedding, start = loader.load_embedding(), 0
        xs = [embedding.forward(batch).contiguous() for batch in batches]
        states = HiddenStates(list(xs), list(xs), batches)
        store.save(f"{HIDDEN_STATES}.0", states.to_tensors())
    for layer in range(start, ctx.depth):
        forward = partial(run_block, loader.load_layer(layer))
        linears = ctx.linears
        floats = {role: linear.weight for role, linear in linears.items()}
        gradients = _saved_gradients(ctx, str(layer))
        packed = solve_layer(
            linears,
            forward,
            states,
            partial(_solve_matrix, ctx, recipes, gradients),
            hessian_damping(ctx),
            _token_weights(gradients),
            _residual_roles(ctx.model.layers[layer], layer),
        )
        propagate(linears, floats, forward, states)
        states.check_finite(f"layers.{layer}")
        _save_matrices(ctx, f"{SOLVED}.{layer}", packed)
        bits = {role: weight.bits for role, weight in packed.items()}
        store.save_json(f"{SOLVED}.{layer}", {"error": states.relative_error(), "bits": bits})
        store.save(f"{HIDDEN_STATES}.{layer + 1}", states.to_tensors())
        store.delete(f"{HIDDEN_STATES}.{layer}")
        ctx.report_progress(SOLVE_UNITS, f"quantising layer {layer}")
    if "head" in ctx.matrices and not store.has(f"{SOLVED}.head"):
        _solve_head(ctx, recipes, states)
    GRAPHS.clear()
    ctx.report_progress(HEAD_UNITS, "quantising the head")


def _solve_matrix(
    ctx: QuantContext,
    recipes: Mapping[str, Recipe],
    gradients: Mapping[str, Tensor],
    role: str,
    w: Tensor,
    hessian: Tensor,
) -> tuple[Tensor, PackedWeight]:
    """One matrix (in, out) of a layer, as its rounded values and as its stored form."""
    solver, bias = ctx.options.solver, ctx.loader.linears[role].bias
    bias = None if bias is None else bias.half()
    f = factorize(w, hessian, hessian_damping(ctx), role)
    if ctx.options.method == "gptq":
        return solve_gptq(w, f, ctx.options.group_size, solver.sweeps, bias)
    outputs = None
    if role in gradients:
        g = gradients[role].to(w.device).float()
        outputs = sensitivity.output_factors(g, solver.output_damping)
    solution = solve_exl2(w, f, recipes[role].groups(len(w)), solver, outputs)
    return solution.dequantize(), solution.pack(bias)


def _solve_head(ctx: QuantContext, recipes: Mapping[str, Recipe], states: HiddenStates) -> None:
    """The head, its columns in the clusters of `_head_grads`."""
    head, solver = ctx.loader.load_head(), ctx.options.solver
    linear, weights = ctx.loader.linears["head"], _saved_gradients(ctx, "head")[f"head{TOKEN_WEIGHTS}"]
    stats = accumulate_clusters(linear, lambda x, batch: head.forward(x, None, batch)[0], states, weights)
    w = linear.weight.T.contiguous()
    groups = recipes["head"].groups(len(w))
    solver = replace(solver, sweeps=2 * solver.sweeps)
    solution = solve_head(w, *stats, _head_clusters(ctx), groups, solver, hessian_damping(ctx))
    bias = None if linear.bias is None else linear.bias.half()
    _save_matrices(ctx, f"{SOLVED}.head", {"head": solution.pack(bias)})


def _head_clusters(ctx: QuantContext) -> Tensor:
    """(columns, clusters) of the head that the loader has in memory."""
    matrix = ctx.loader.linears["head"].weight
    return cluster_columns(matrix, cluster_count(matrix.shape[1], len(matrix)), ctx.options.seed)


def hessian_damping(ctx: QuantContext) -> float:
    """Added to the diagonal of H, relative to its mean."""
    damping = ctx.options.solver.damping
    return max(damping, GPTQ_DAMPING) if ctx.options.method == "gptq" else damping


def _saved_gradients(ctx: QuantContext, name: str) -> dict[str, Tensor]:
    """What the backward pass saved of a layer or the head; nothing for GPTQ, which has no backward pass."""
    return ctx.store.load(f"{OUTPUT_GRADIENTS}.{name}") if ctx.store.has(f"{OUTPUT_GRADIENTS}.{name}") else {}


def _token_weights(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        role.removesuffix(TOKEN_WEIGHTS): weights for role, weights in gradients.items() if role.endswith(TOKEN_WEIGHTS)
    }


def _residual_roles(layer: spec.Layer, number: int) -> list[str]:
    """Roles whose outputs are added to the residual stream unchanged, without a norm or a scale."""
    if layer.residual_scale != 1.0:
        return []
    ends: tuple[str, ...] = ()
    if layer.attn_post is None and not _scales_outputs(layer.mixer):
        ends += "attn.o", "delta.o", "mamba.out", "conv.out"
    if layer.mlp_post is None and not (isinstance(layer.mlp, spec.Mlp) and layer.mlp.out_scale != 1.0):
        ends += ("mlp.down",)
    return [f"layers.{number}.{end}" for end in ends]


def _scales_outputs(mixer: spec.Mixer | None) -> bool:
    return isinstance(mixer, spec.ParallelMixers) and (mixer.attention_out_scale, mixer.recurrent_out_scale) != (1, 1)


def _save_matrices(ctx: QuantContext, name: str, packed: Mapping[str, PackedWeight]) -> None:
    tensors = {
        f"{role}|{key}": tensor
        for role, weight in packed.items()
        for key, tensor in ctx.file_tensors(role, weight).items()
    }
    ctx.store.save(name, tensors)


def solved_tensors(ctx: QuantContext, role: str) -> dict[str, Tensor]:
    """A quantised matrix's tensors, by their names in the new model."""
    tensors = ctx.store.load(f"{SOLVED}.head" if role == "head" else f"{SOLVED}.{role.split('.')[1]}")
    return {key.partition("|")[2]: t for key, t in tensors.items() if key.partition("|")[0] == role}


# -- 5. write --------------------------------------------------------------------------------------


@contextmanager
def write(ctx: QuantContext, output: OutputOptions) -> Iterator[Path]:
    """Write the new folder under a hidden name; it gets its own when the block ends without an error."""
    ctx.report_progress(0, "writing")
    with write_model(
        output.folder,
        ctx.frozen,
        ctx.source,
        ctx.matrices.keys(),
        partial(solved_tensors, ctx),
        _quantization_config(ctx),
        shard_bytes=output.shard_bytes,
        overwrite=output.overwrite,
    ) as hidden:
        _check_written(hidden, ctx)
        yield hidden


def _check_written(hidden: Path, ctx: QuantContext) -> None:
    """Open the written model: every matrix must be found in the new format."""
    frozen = Config(hidden).freeze()
    source = frozen.open_checkpoint()
    for role in ctx.matrices:
        form, _ = source.describe(role)
        if not form.startswith(ctx.options.method):
            raise InputError(f"{role} should have been written as {ctx.options.method}, found {form}.")


def _quantization_config(ctx: QuantContext) -> dict[str, Any]:
    """config.json's quantization_config."""
    options, (rows, length) = ctx.options, calibration_ids(ctx).shape
    if options.method == "gptq":
        return {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": options.group_size,
            "desc_act": True,
            "sym": False,
            "checkpoint_format": "gptq",
        }
    matrices = quantized_matrices(ctx.model)
    used = sum(8 * t.nbytes for m in matrices for t in solved_tensors(ctx, m.role).values())
    return {
        "quant_method": "exl2",
        "version": f"exlm {__version__}",
        "bits": options.bits if options.bits is not None else round(used / ctx.num_weights, 4),
        "head_bits": options.head_bits,
        "calibration": {"rows": rows, "length": length, "dataset": calibration_name(options)},
    }


# -- 6. report -------------------------------------------------------------------------------------


def report(ctx: QuantContext, output: OutputOptions, folder: Path) -> Quality | None:
    """Evaluate the new folder against the source, and add the report to it.

    `_TargetMissed` if it diverges by more than max_kld and there has been no second try.
    """
    max_kld, source = ctx.options.max_kld, Path(ctx.frozen.path)
    if not output.report and max_kld is None:
        return None
    ctx.report_progress(0, "evaluating the result")
    quality = evaluate_model(folder, source, device=str(ctx.loader.device), speed=output.report)
    assert quality.kl is not None
    if max_kld is not None and quality.kl > max_kld:
        message = f"a divergence of {quality.kl:.3g} was found, at most {max_kld:g} was asked for."
        if plan_retry(ctx, quality.kl):
            raise _TargetMissed(message)
        log.warning("%s: %s Ask for less, or calibrate with more text.", output.folder.name, message)
    quality = replace(quality, model=output.folder.name, against=_display_name(source))
    if output.report:
        write_report(folder, quality, _card_facts(ctx, quality, _display_name(source)), MODEL_CARD)
    return quality


def plan_retry(ctx: QuantContext, kl: float) -> bool:
    """After a first try that diverges by `kl`: aim lower by as much as it missed. False after a second try.

    The matrices then have to be solved again.
    """
    wanted = ctx.options.max_kld
    assert wanted is not None
    if _retry_target(ctx) is not None:
        return False
    ctx.store.delete(
        f"{SOLVED}.head", f"{HIDDEN_STATES}.{ctx.depth}"
    )  # first: if killed here, the first try is repeated
    ctx.store.save_json(RETRY_TARGET, {"wanted": wanted, "harm": RETRY_MARGIN * wanted * wanted / kl})
    ctx.done = ctx.total - ctx.depth * SOLVE_UNITS - HEAD_UNITS
    return True


def _card_facts(ctx: QuantContext, quality: Quality, source: str) -> dict[str, str]:
    """What the card says about how the model was made."""
    (rows, length), max_kld = calibration_ids(ctx).shape, ctx.options.max_kld
    facts = {"method": ctx.options.method, "source": source, "bits a weight": f"{quality.bits:.3f}"}
    if max_kld is not None:
        kept = "kept" if quality.kl is not None and quality.kl <= max_kld else "not kept"
        facts["divergence asked for"] = f"at most {max_kld:g}: {kept}"
    calibration = f"{calibration_name(ctx.options)}, {rows} rows of {length} tokens"
    return facts | {"calibration": calibration, "made with": f"exlm {__version__}"}


def _display_name(source: Path) -> str:
    """The folder's name; of a snapshot from the Hub, repository and commit."""
    kept, repository = source.parent.name, source.parent.parent.name
    if kept == "snapshots" and repository.startswith("models--"):
        return f"{repository.removeprefix('models--').replace('--', '/', 1)}@{source.name}"
    return source.name
