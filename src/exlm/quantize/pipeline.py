"""Quantisation step by step: calibrate, measure sensitivity, allocate bits, solve, write, report.

`run` calls the steps in this order. Every step leaves its results in the step store and takes up what is
there already, so a job that was killed continues after its last finished step and ends with the same bytes.
One layer of the model is in memory at a time. The store has:

    ids               token ids (rows, length)
    state.N           the float model's hidden states before layer N, by batch; deleted once used
    slope.N           the gradients of -log p(sampled token) there; deleted once used
    gradients.N       of layer N, by role: output Hessian G, and `ROLE|care` token weights; `gradients.head`
    profile.ROLE      a matrix's KL costs (JSON)
    listened          the backward pass is complete (JSON)
    aim               the KL cost to aim at in the second try for max_kld (JSON)
    streams.N         both models' hidden states before layer N
    layer.N           the quantised tensors of layer N, `ROLE|NAME`; error and bits (JSON); `layer.head`

Jobs are continued across versions: these names, and those of the tensors, are a file format.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import spec
from ..checkpoint import open_source
from ..config import Config
from ..errors import InputError
from ..formats import PackedWeight
from ..nn import Batch
from ..version import __version__
from . import sensitivity
from .allocation import HEAD_RECIPES, Recipe, allocate_budget, allocate_kl, min_kl_cost, quantized_matrices
from .calibration import make_calibration_ids
from .config import calibration_name
from .context import QuantContext
from .cuda_graphs import GRAPHS
from .evaluate import Quality, evaluate_model, write_report
from .gptq import factorize
from .layer_loader import make_batch, run_block
from .layer_solver import HiddenStates, accumulate_clusters, advance, solve_layer
from .lm_head import cluster_columns, cluster_count, solve_head
from .matrix_solver import solve_exl2, solve_gptq
from .memory import PASS_TOKENS
from .output import CARD, write_model
from .sensitivity import Measurement, Profile, parse_profile
from .step_store import damaged_step

log = logging.getLogger(__name__)

FORWARD_UNITS, BACKWARD_UNITS, SOLVE_UNITS, HEAD_UNITS = 1, 6, 12, 12
"""Units of the progress bar, in proportion to the time that steps take."""

TOKEN_WEIGHTS = "|care"
"""Behind a role in `gradients.N`: the tokens' weights at that matrix."""

GPTQ_DAMPING = 0.02
"""The least damping for the GPTQ format: with a single width, GPTQ overfits short calibration text sooner."""

RETRY_MARGIN = 0.9
"""The second try for max_kld aims this far below what the first try's miss calls for."""


@dataclass(frozen=True)
class OutputOptions:
    """Where the model goes, and how it is written."""

    folder: Path
    shard_bytes: int
    overwrite: bool
    report: bool


def run(
    ctx: QuantContext, known: Measurement | None, save_measurement: Path | None, output: OutputOptions
) -> Quality | None:
    """All steps; `known` is a measurement made before. Returns the report's figures, if there is a report."""
    batches = calibrate(ctx)
    measurement = None
    if ctx.config.method == "exl2":
        measurement = measure_sensitivity(ctx, batches, known)
        if save_measurement is not None:
            measurement.save(save_measurement)
    while True:
        recipes = {} if measurement is None else allocate_bits(ctx, measurement)
        solve_layers(ctx, batches, recipes)
        try:
            return write_and_report(ctx, output)
        except _TargetMissed as missed:
            log.info("%s: %s", output.folder.name, missed)


class _TargetMissed(Exception):
    """The model diverges by more than max_kld, and is made once again with more bits."""


def progress_units(depth: int, exl2: bool) -> int:
    """Units of a whole job."""
    return depth * ((FORWARD_UNITS + BACKWARD_UNITS if exl2 else 0) + SOLVE_UNITS) + 2 * HEAD_UNITS


# -- 1. calibrate ----------------------------------------------------------------------------------


def calibrate(ctx: QuantContext) -> list[Batch]:
    """The calibration text as forward passes of about PASS_TOKENS tokens."""
    ids = calibration_ids(ctx)
    rows = max(1, PASS_TOKENS // ids.shape[1])
    device = ctx.loader.backends.device
    return [make_batch(ids[a : a + rows].to(device)) for a in range(0, len(ids), rows)]


def calibration_ids(ctx: QuantContext) -> Tensor:
    """(rows, length) token ids, made once per job."""
    if not ctx.store.has("ids"):
        ctx.store.save("ids", {"ids": make_calibration_ids(ctx.model_config, ctx.config, ctx.loader)})
    return ctx.store.load("ids")["ids"]


# -- 2. measure sensitivity ------------------------------------------------------------------------


@torch.no_grad()
def measure_sensitivity(ctx: QuantContext, batches: list[Batch], known: Measurement | None) -> Measurement:
    """One forward and one backward pass, layer by layer: output Hessians, token weights, KL costs by width.

    A `known` measurement replaces the KL costs; the solver needs the Hessians and the weights all the same.
    """
    store, depth = ctx.store, ctx.depth
    ctx.advance(0, "measuring")
    if store.load_json("listened"):
        ctx.advance(depth * (FORWARD_UNITS + BACKWARD_UNITS), "measuring")
        return known or _collect_profiles(ctx)
    start = next((i for i in range(depth + 1) if store.has(f"slope.{i}")), depth)
    grads = store.load(f"slope.{start}") if store.has(f"slope.{start}") else _head_grads(ctx, batches)
    ctx.advance(depth * FORWARD_UNITS + (depth - start) * BACKWARD_UNITS, "measuring")
    for i in reversed(range(start)):
        grads = _backward_layer(ctx, batches, i, grads, profiles=known is None)
        ctx.advance(BACKWARD_UNITS, f"measuring layer {i}")
    store.save_json("listened", True)
    store.delete("slope.0", "state.0")
    return known or _collect_profiles(ctx)


def _head_grads(ctx: QuantContext, batches: list[Batch]) -> dict[str, Tensor]:
    """The gradients behind the last layer, by batch; saves the tokens' weights for the head's clusters."""
    states, head = _forward_pass(ctx, batches), ctx.loader.load_head()
    membership = _head_clusters(ctx)
    grads, weights = {}, []
    for i, batch in enumerate(batches):
        generator = torch.Generator().manual_seed(ctx.config.seed + i)
        x = states[f"{i:04}"].to(batch.ids.device)
        grads[f"{i:04}"], own = sensitivity.head_grad(head, x, batch, generator, membership)
        weights.append(own.flatten(0, 1))
    ctx.store.save("gradients.head", {f"head{TOKEN_WEIGHTS}": torch.cat(weights)})
    ctx.store.save(f"slope.{ctx.depth}", grads)
    return grads


def _forward_pass(ctx: QuantContext, batches: list[Batch]) -> dict[str, Tensor]:
    """The float model's hidden states behind the last layer, by batch; those before each layer are saved."""
    store = ctx.store
    start = max((i for i in range(ctx.depth + 1) if store.has(f"state.{i}")), default=0)
    if store.has(f"state.{start}"):
        states = store.load(f"state.{start}")
    else:
        embedding = ctx.loader.load_embedding()
        states = {f"{i:04}": embedding.forward(b) for i, b in enumerate(batches)}
        store.save("state.0", states)
    for layer in range(start, ctx.depth):
        block = ctx.loader.load_layer(layer)
        for key, b in ((f"{i:04}", b) for i, b in enumerate(batches)):
            states[key] = run_block(block, states[key].to(b.ids.device), b)
        if not all(bool(torch.isfinite(x).all()) for x in states.values()):
            raise InputError(
                f"layers.{layer}: the source model's outputs hold NaN or infinity on the calibration text. "
                "Calibrate with other text, or check the source model with `exlm eval`."
            )
        store.save(f"state.{layer + 1}", states)
    return states


def _backward_layer(
    ctx: QuantContext, batches: list[Batch], layer: int, grads: dict[str, Tensor], *, profiles: bool
) -> dict[str, Tensor]:
    """The gradients before a layer from those behind it; saves what its matrices' hooks found."""
    store, solver = ctx.store, ctx.config.solver
    block = ctx.loader.load_layer(layer)
    hooks = sensitivity.FisherHooks(ctx.loader.linears)
    states, before = store.load(f"state.{layer}"), {}
    for key, batch in ((f"{i:04}", b) for i, b in enumerate(batches)):
        device = batch.ids.device
        grad = grads[key].to(device, copy=True)  # in fresh memory: alignment can change the last bits of sums
        before[key] = sensitivity.vjp(block, states[key].to(device), batch, grad)
    saved = {}
    for role, stats in hooks.stats.items():
        if stats.gradient_sum.dim() == 2:
            saved[role] = (stats.gradient_sum / stats.gradient_sum.diagonal().mean().clamp(min=1e-30)).half()
        if ".experts." not in role:
            saved[f"{role}{TOKEN_WEIGHTS}"] = torch.cat(stats.token_weights)
        if profiles:
            w = ctx.loader.linears[role].weight.T.contiguous()
            profile = sensitivity.measure_profile(w, stats, solver.damping, solver.output_damping, role)
            store.save_json(f"profile.{role}", profile.to_json())
    store.save(f"gradients.{layer}", saved)
    store.save(f"slope.{layer}", before)
    store.delete(f"slope.{layer + 1}", f"state.{layer + 1}")
    return before


def _collect_profiles(ctx: QuantContext) -> Measurement:
    """The measurement from the saved profiles."""
    profiles: dict[str, Profile] = {}
    roles = [m.role for m in quantized_matrices(ctx.model)]
    for role in roles:
        raw = ctx.store.load_json(f"profile.{role}")
        if raw is not None:
            path = ctx.store.folder / f"profile.{role}.json"
            try:
                profiles[role] = parse_profile(raw, path, role)
            except InputError as error:
                raise damaged_step(path, error) from error
    for role in roles:
        if role not in profiles:
            profiles[role] = _sibling_profile(role, profiles)
    return Measurement.from_profiles(profiles, ctx.model)


def _sibling_profile(role: str, profiles: Mapping[str, Profile]) -> Profile:
    """For an expert that no token was routed to: the profile of another expert of its layer."""
    before, _, rest = role.partition(".experts.")
    part = rest.rpartition(".")[2]
    for other, profile in profiles.items():
        if other.startswith(f"{before}.experts.") and other.endswith(f".{part}"):
            return profile
    raise InputError(f"{role}: no token of the calibration text reached it. Calibrate with more text.")


# -- 3. allocate bits ------------------------------------------------------------------------------


def allocate_bits(ctx: QuantContext, measurement: Measurement) -> dict[str, Recipe]:
    """The recipe of every matrix, by role: the least KL cost for a budget, or the fewest bits for max_kld."""
    config, slots = ctx.config, measurement.slots
    if config.max_kld is not None:
        if not measurement.profiles:
            raise InputError("max_kld needs a measurement by exlm: exllamav2's has no KL divergence in it.")
        target = _retry_target(ctx)
        allocation = allocate_kl(slots, max(target, min_kl_cost(slots)) if target else config.max_kld)
    elif config.bits is not None:
        allocation = allocate_budget(slots, int(ctx.num_weights * config.bits), ctx.num_weights)
    else:
        assert config.size is not None
        allocation = allocate_budget(slots, 8 * config.size - ctx.fixed_bits, ctx.num_weights)
    recipes = {role: recipe for choice in allocation.choices for role, recipe in choice.recipes.items()}
    return recipes | {"head": HEAD_RECIPES[config.head_bits]}


def _retry_target(ctx: QuantContext) -> float | None:
    """The KL cost to aim at in the second try; None in the first."""
    saved = ctx.store.load_json("aim")
    try:
        return float(saved["harm"]) if saved is not None and saved["wanted"] == ctx.config.max_kld else None
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise damaged_step(ctx.store.folder / "aim.json", repr(error)) from error


# -- 4. solve layer by layer -----------------------------------------------------------------------


@torch.no_grad()
def solve_layers(ctx: QuantContext, batches: list[Batch], recipes: Mapping[str, Recipe]) -> None:
    """Every layer in turn on the outputs of the quantised layers before it, then the head."""
    store, loader = ctx.store, ctx.loader
    saved = [i for i in range(ctx.depth + 1) if store.has(f"streams.{i}")]
    if saved:
        start = saved[-1]
        states = HiddenStates.from_tensors(store.load(f"streams.{start}"), batches)
        ctx.advance(SOLVE_UNITS * start, "quantising")
    else:
        embedding, start = loader.load_embedding(), 0
        xs = [embedding.forward(batch).contiguous() for batch in batches]
        states = HiddenStates(list(xs), list(xs), batches)
        store.save("streams.0", states.to_tensors())
    for layer in range(start, ctx.depth):
        forward = partial(run_block, loader.load_layer(layer))
        floats = {role: linear.weight for role, linear in loader.linears.items()}
        gradients = _saved_gradients(ctx, str(layer))
        packed = solve_layer(
            loader.linears,
            forward,
            states,
            partial(_solve_matrix, ctx, recipes, gradients),
            hessian_damping(ctx),
            _token_weights(gradients),
            _residual_roles(ctx.model.layers[layer], layer),
        )
        advance(loader.linears, floats, forward, states)
        states.check_finite(f"layers.{layer}")
        _save_matrices(ctx, f"layer.{layer}", packed)
        bits = {role: weight.bits for role, weight in packed.items()}
        store.save_json(f"layer.{layer}", {"error": states.relative_error(), "bits": bits})
        store.save(f"streams.{layer + 1}", states.to_tensors())
        store.delete(f"streams.{layer}")
        ctx.advance(SOLVE_UNITS, f"quantising layer {layer}")
    if "head" in ctx.matrices and not store.has("layer.head"):
        _solve_head(ctx, recipes, states)
    GRAPHS.clear()
    ctx.advance(HEAD_UNITS, "quantising the head")


def _solve_matrix(
    ctx: QuantContext,
    recipes: Mapping[str, Recipe],
    gradients: Mapping[str, Tensor],
    role: str,
    w: Tensor,
    hessian: Tensor,
) -> tuple[Tensor, PackedWeight]:
    """One matrix (in, out) of a layer, as its rounded values and as its stored form."""
    solver, bias = ctx.config.solver, ctx.loader.linears[role].bias
    bias = None if bias is None else bias.half()
    f = factorize(w, hessian, hessian_damping(ctx), role)
    if ctx.config.method == "gptq":
        return solve_gptq(w, f, ctx.config.group_size, solver.sweeps, bias)
    outputs = None
    if role in gradients:
        g = gradients[role].to(w.device).float()
        outputs = sensitivity.output_factors(g, solver.output_damping)
    solution = solve_exl2(w, f, recipes[role].groups(len(w)), solver, outputs)
    return solution.dequantize(), solution.pack(bias)


def _solve_head(ctx: QuantContext, recipes: Mapping[str, Recipe], states: HiddenStates) -> None:
    """The head, its columns in the clusters of `_head_grads`."""
    head, solver = ctx.loader.load_head(), ctx.config.solver
    linear, weights = ctx.loader.linears["head"], _saved_gradients(ctx, "head")[f"head{TOKEN_WEIGHTS}"]
    stats = accumulate_clusters(linear, lambda x, batch: head.forward(x, None, batch)[0], states, weights)
    w = linear.weight.T.contiguous()
    groups = recipes["head"].groups(len(w))
    solver = replace(solver, sweeps=2 * solver.sweeps)
    solution = solve_head(w, *stats, _head_clusters(ctx), groups, solver, hessian_damping(ctx))
    bias = None if linear.bias is None else linear.bias.half()
    _save_matrices(ctx, "layer.head", {"head": solution.pack(bias)})


def _head_clusters(ctx: QuantContext) -> Tensor:
    """(columns, clusters) of the head that the loader has in memory."""
    matrix = ctx.loader.linears["head"].weight
    return cluster_columns(matrix, cluster_count(matrix.shape[1], len(matrix)), ctx.config.seed)


def hessian_damping(ctx: QuantContext) -> float:
    """Added to the diagonal of H, relative to its mean."""
    damping = ctx.config.solver.damping
    return max(damping, GPTQ_DAMPING) if ctx.config.method == "gptq" else damping


def _saved_gradients(ctx: QuantContext, name: str) -> dict[str, Tensor]:
    """What the backward pass saved of a layer or the head; nothing for GPTQ, which has no backward pass."""
    return ctx.store.load(f"gradients.{name}") if ctx.store.has(f"gradients.{name}") else {}


def _token_weights(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        role.removesuffix(TOKEN_WEIGHTS): weights
        for role, weights in gradients.items()
        if role.endswith(TOKEN_WEIGHTS)
    }


def _residual_roles(layer: spec.Layer, number: int) -> list[str]:
    """Roles whose outputs are added to the residual stream unchanged, without a norm or a scale."""
    if layer.residual_scale != 1.0:
        return []
    ends = {"attn.o": layer.attn_post, "mlp.down": layer.mlp_post}
    return [f"layers.{number}.{end}" for end, norm in ends.items() if norm is None]


def _save_matrices(ctx: QuantContext, name: str, packed: Mapping[str, PackedWeight]) -> None:
    tensors = {
        f"{role}|{key}": tensor
        for role, weight in packed.items()
        for key, tensor in ctx.file_tensors(role, weight).items()
    }
    ctx.store.save(name, tensors)


def solved_tensors(ctx: QuantContext, role: str) -> dict[str, Tensor]:
    """A quantised matrix's tensors, by their names in the new model."""
    tensors = ctx.store.load("layer.head" if role == "head" else f"layer.{role.split('.')[1]}")
    return {key.partition("|")[2]: t for key, t in tensors.items() if key.partition("|")[0] == role}


# -- 5. write, 6. report ---------------------------------------------------------------------------


def write_and_report(ctx: QuantContext, output: OutputOptions) -> Quality | None:
    """Write the new folder, evaluate it against the source, and add the report.

    The folder gets its name only when all of it is there. `_TargetMissed`, which discards it, if it diverges
    by more than max_kld and there has been no second try.
    """
    ctx.advance(0, "writing")
    config = _quantization_config(ctx)
    roles = ctx.matrices.keys()
    with write_model(
        output.folder,
        ctx.frozen,
        ctx.source,
        roles,
        partial(solved_tensors, ctx),
        config,
        shard_bytes=output.shard_bytes,
        overwrite=output.overwrite,
    ) as hidden:
        _check_written(hidden, ctx)
        max_kld, source = ctx.config.max_kld, Path(ctx.frozen.path)
        if not output.report and max_kld is None:
            return None
        ctx.advance(0, "evaluating the result")
        device = str(ctx.loader.backends.device)
        quality = evaluate_model(hidden, source, device=device, speed=output.report)
        assert quality.kl is not None
        if max_kld is not None and quality.kl > max_kld:
            message = f"a divergence of {quality.kl:.3g} was found, at most {max_kld:g} was asked for."
            if plan_retry(ctx, quality.kl):
                raise _TargetMissed(message)
            log.warning("%s: %s Ask for less, or calibrate with more text.", output.folder.name, message)
        quality = replace(quality, model=output.folder.name, against=_display_name(source))
        if output.report:
            write_report(hidden, quality, _card_facts(ctx, config, quality, _display_name(source)), CARD)
        return quality


def plan_retry(ctx: QuantContext, kl: float) -> bool:
    """After a first try that diverges by `kl`: aim lower by as much as it missed. False after a second try.

    The matrices then have to be solved again.
    """
    wanted = ctx.config.max_kld
    assert wanted is not None
    if _retry_target(ctx) is not None:
        return False
    ctx.store.delete("layer.head", f"streams.{ctx.depth}")  # first: if killed here, the first try is repeated
    ctx.store.save_json("aim", {"wanted": wanted, "harm": RETRY_MARGIN * wanted * wanted / kl})
    ctx.done = ctx.total - ctx.depth * SOLVE_UNITS - HEAD_UNITS
    return True


def _check_written(hidden: Path, ctx: QuantContext) -> None:
    """Open the written model: every matrix must be found in the new format."""
    frozen = Config(hidden).freeze()
    source = open_source(frozen.path, frozen.spec.names, frozen.quantization)
    for role in ctx.matrices:
        form, _ = source.describe(role)
        if not form.startswith(ctx.config.method):
            raise InputError(f"{role} should have been written as {ctx.config.method}, found {form}.")


def _quantization_config(ctx: QuantContext) -> dict[str, Any]:
    """config.json's quantization_config."""
    config, (rows, length) = ctx.config, calibration_ids(ctx).shape
    if config.method == "gptq":
        return {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": config.group_size,
            "desc_act": True,
            "sym": False,
            "checkpoint_format": "gptq",
        }
    matrices = quantized_matrices(ctx.model)
    used = sum(8 * t.nbytes for m in matrices for t in solved_tensors(ctx, m.role).values())
    return {
        "quant_method": "exl2",
        "version": f"exlm {__version__}",
        "bits": config.bits if config.bits is not None else round(used / ctx.num_weights, 4),
        "head_bits": config.head_bits,
        "calibration": {"rows": rows, "length": length, "dataset": calibration_name(config)},
    }


def _card_facts(
    ctx: QuantContext, config: Mapping[str, Any], quality: Quality, source: str
) -> dict[str, str]:
    """What the card says about how the model was made."""
    (rows, length), max_kld = calibration_ids(ctx).shape, ctx.config.max_kld
    facts = {"method": str(config["quant_method"]), "source": source, "bits a weight": f"{quality.bits:.3f}"}
    if max_kld is not None:
        kept = "kept" if quality.kl is not None and quality.kl <= max_kld else "not kept"
        facts["divergence asked for"] = f"at most {max_kld:g}: {kept}"
    calibration = f"{calibration_name(ctx.config)}, {rows} rows of {length} tokens"
    return facts | {"calibration": calibration, "made with": f"exlm {__version__}"}


def _display_name(source: Path) -> str:
    """The folder's name; of a snapshot from the Hub, repository and commit."""
    kept, repository = source.parent.name, source.parent.parent.name
    if kept == "snapshots" and repository.startswith("models--"):
        return f"{repository.removeprefix('models--').replace('--', '/', 1)}@{source.name}"
    return source.name
