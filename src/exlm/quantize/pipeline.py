"""From a float model to a quantised one, step by step: calibrate, measure, give out bits, quantise, write.

Every step leaves its result in the job's folder, and begins with what the one before left there: a job that
is killed goes on behind its last step and ends with the same bytes. One layer is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from .. import spec
from ..errors import InputError
from ..formats import PackedWeight
from . import layer_solver as streams
from . import sensitivity as measure
from .allocation import Allocation, allocate_budget, allocate_kl, min_kl_cost
from .context import QuantContext
from .cuda_graphs import GRAPHS
from .exl2_solver import solve_exl2
from .gptq import factorize
from .gptq_format import solve_gptq
from .layer_loader import run_block
from .layer_solver import HiddenStates
from .lm_head import solve_head
from .measurement import Measurement, Profile, min_layer_bits, parse_profile, quantized_matrices
from .output import unquantized_bytes
from .recipe import HEAD_RECIPES, Recipe
from .step_store import damaged_step
from .vocab_clusters import cluster_columns, cluster_count

FORWARD_UNITS, BACKWARD_UNITS, SOLVE_UNITS, HEAD_UNITS = (
    1,
    6,
    12,
    12,
)  # units of the progress bar: how long steps take

GPTQ_DAMPING = 0.02
"""At least: with few widths to choose from, GPTQ alone follows little text too closely."""

TOKEN_WEIGHT = "|care"
"""Behind a role: how much each token's answer matters, beside how the outputs matter together."""

RETRY_MARGIN = 0.9
"""How much better than needed a second try is meant to be."""


def progress_units(depth: int, measures: bool) -> int:
    """Of a whole job."""
    return depth * ((FORWARD_UNITS + BACKWARD_UNITS if measures else 0) + SOLVE_UNITS) + 2 * HEAD_UNITS


@torch.no_grad()
def backward_pass(work: QuantContext, measures: bool) -> None:
    """Gradients at every matrix's outputs and, with `measures`, its profile; from the last layer down."""
    job, depth = work.store, work.depth
    work.advance(0, "measuring")
    if job.load_json("listened"):
        work.advance(depth * (FORWARD_UNITS + BACKWARD_UNITS), "measuring")
        return
    begun = next((i for i in range(depth + 1) if job.has(f"slope.{i}")), depth)
    slopes = job.load(f"slope.{begun}") if job.has(f"slope.{begun}") else _head_grads(work)
    work.advance(depth * FORWARD_UNITS + (depth - begun) * BACKWARD_UNITS, "measuring")
    for i in reversed(range(begun)):
        slopes = _backward_layer(work, i, slopes, measures)
        work.advance(BACKWARD_UNITS, f"measuring layer {i}")
    job.save_json("listened", True)
    job.delete("slope.0", "state.0")


def _head_grads(work: QuantContext) -> dict[str, Tensor]:
    """The gradients behind the last layer; how much each token matters to each kind of logits is kept."""
    states, head, slopes, care = _forward_pass(work), work.loader.load_head(), {}, []
    belongs = _head_clusters(work)
    for i, batch in enumerate(work.batches()):
        generator = torch.Generator().manual_seed(work.config.seed + i)
        x = states[f"{i:04}"].to(batch.ids.device)
        slopes[f"{i:04}"], mattering = measure.head_grad(head, x, batch, generator, belongs)
        care.append(mattering.flatten(0, 1))
    work.store.save("gradients.head", {f"head{TOKEN_WEIGHT}": torch.cat(care)})
    work.store.save(f"slope.{work.depth}", slopes)
    return slopes


def _forward_pass(work: QuantContext) -> dict[str, Tensor]:
    """The float model's states before every layer, each kept until the way back has passed it; the last."""
    job, batches = work.store, work.batches()
    begun = max((i for i in range(work.depth + 1) if job.has(f"state.{i}")), default=0)
    if job.has(f"state.{begun}"):
        states = job.load(f"state.{begun}")
    else:
        embedding = work.loader.load_embedding()
        states = {f"{i:04}": embedding.forward(b) for i, b in enumerate(batches)}
        job.save("state.0", states)
    for layer in range(begun, work.depth):
        block = work.loader.load_layer(layer)
        for key, b in ((f"{i:04}", b) for i, b in enumerate(batches)):
            states[key] = run_block(block, states[key].to(b.ids.device), b)
        if not all(bool(torch.isfinite(x).all()) for x in states.values()):
            raise InputError(
                f"layers.{layer}: the source model's answers hold NaN or infinity on the calibration text. "
                "Calibrate with other text, or check the source model with `exlm eval`."
            )
        job.save(f"state.{layer + 1}", states)
    return states


def _backward_layer(
    work: QuantContext, layer: int, slopes: dict[str, Tensor], measures: bool
) -> dict[str, Tensor]:
    """Through one layer; the gradients before it."""
    job, effort = work.store, work.config.solver
    block = work.loader.load_layer(layer)
    ear = measure.FisherHooks(work.loader.linears)
    states, carried = job.load(f"state.{layer}"), {}
    for key, batch in ((f"{i:04}", b) for i, b in enumerate(work.batches())):
        device = batch.ids.device
        slope = slopes[key].to(device, copy=True)  # sums may differ with where numbers begin in memory
        carried[key] = measure.vjp(block, states[key].to(device), batch, slope)
    kept = {}
    for role, heard in ear.stats.items():
        if heard.gradients.dim() == 2:
            kept[role] = (heard.gradients / heard.gradients.diagonal().mean().clamp(min=1e-30)).half()
        if ".experts." not in role:
            kept[f"{role}{TOKEN_WEIGHT}"] = torch.cat(heard.token_weights)
        if measures:
            w = work.loader.linears[role].data.T.contiguous()
            found = measure.measure_profile(w, heard, effort.damping, effort.output_damping, role)
            job.save_json(f"profile.{role}", found.to_json())
    job.save(f"gradients.{layer}", kept)
    job.save(f"slope.{layer}", carried)
    job.delete(f"slope.{layer + 1}", f"state.{layer + 1}")
    return carried


def collect_measurement(work: QuantContext) -> Measurement:
    """What `listen` has found."""
    profiles: dict[str, Profile] = {}
    roles = [m.role for m in quantized_matrices(work.model)]
    for role in roles:
        raw = work.store.load_json(f"profile.{role}")
        if raw is not None:
            path = work.store.folder / f"profile.{role}.json"
            try:
                profiles[role] = parse_profile(raw, path, role)
            except InputError as error:
                raise damaged_step(path, error) from error
    for role in roles:
        if role not in profiles:
            profiles[role] = _sibling_profile(role, profiles)
    return Measurement.from_profiles(profiles, work.model)


def _sibling_profile(role: str, profiles: Mapping[str, Profile]) -> Profile:
    """For an expert that no token of the calibration reached: that of one beside it."""
    before, _, rest = role.partition(".experts.")
    part = rest.rpartition(".")[2]
    for other, found in profiles.items():
        if other.startswith(f"{before}.experts.") and other.endswith(f".{part}"):
            return found
    raise InputError(f"{role}: no token of the calibration reached it. Calibrate with more text.")


def allocate_bits(work: QuantContext, measurement: Measurement) -> Allocation:
    """The choice of every slot that meets the target."""
    wishes = work.config
    weights = sum(m.in_features * m.out_features for m in quantized_matrices(work.model))
    if wishes.max_kld is not None:
        if not measurement.profiles:
            raise InputError("max_kld needs a measurement by exlm: the old converter's has other errors.")
        aim = _retry_target(work)
        return allocate_kl(
            measurement.slots, max(aim, min_kl_cost(measurement.slots)) if aim else wishes.max_kld
        )
    if wishes.bits is not None:
        return allocate_budget(measurement.slots, int(weights * wishes.bits), weights)
    assert wishes.size is not None
    return allocate_budget(measurement.slots, 8 * wishes.size - _fixed_bits(work), weights)


def check_target(work: QuantContext, known: Measurement | None) -> None:
    """`InputError` before any work, if the fewest bits that matrices can take are too many."""
    wishes = work.config
    if known is None:
        fewest = min_layer_bits(work.model)
    else:
        fewest = sum(min(choice.bits for choice in slot) for slot in known.slots)
    weights = sum(m.in_features * m.out_features for m in quantized_matrices(work.model))
    if wishes.bits is not None and fewest > int(weights * wishes.bits):
        raise InputError(
            f"{wishes.bits:g} bits a weight cannot be reached: the smallest this model can be is "
            f"{fewest / weights:.3f}, scales and orders of rows included. Ask for more bits."
        )
    if wishes.size is not None and fewest > 8 * wishes.size - _fixed_bits(work):
        beside = -(-_fixed_bits(work) // 8)
        raise InputError(
            f"A size of {wishes.size:,} bytes cannot be reached: the smallest this model can be is "
            f"{beside - (-fewest // 8):,}, of which {beside:,} are embedding and norms in float16, and the "
            f"head in {wishes.head_bits} bits. Ask for more, or for fewer head_bits."
        )


def _fixed_bits(work: QuantContext) -> int:
    """The bits of what is no matrix of a layer: the head, and what stays as it is."""
    head = HEAD_RECIPES[work.config.head_bits].bits(work.matrices["head"])
    return head + 8 * unquantized_bytes(work.plan, work.model, work.matrices.keys())


def plan_retry(work: QuantContext, found: float) -> bool:
    """After a model that diverges by `found`: aim lower by as much as it missed, once; False the second time.

    The layers are then to be quantised anew.
    """
    wanted = work.config.max_kld
    assert wanted is not None
    if _retry_target(work) is not None:
        return False
    work.store.delete(
        "layer.head", f"streams.{work.depth}"
    )  # before the note: a kill between repeats the first try
    work.store.save_json("aim", {"wanted": wanted, "harm": RETRY_MARGIN * wanted * wanted / found})
    work.done = work.total - work.depth * SOLVE_UNITS - HEAD_UNITS
    return True


def _retry_target(work: QuantContext) -> float | None:
    """The harm that is aimed at once the first try has missed."""
    noted = work.store.load_json("aim")
    try:
        return float(noted["harm"]) if noted is not None and noted["wanted"] == work.config.max_kld else None
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise damaged_step(work.store.folder / "aim.json", repr(error)) from error


@torch.no_grad()
def solve_layers(work: QuantContext, recipes: Mapping[str, Recipe]) -> None:
    """Every layer in turn, then the head, on the streams of the calibration."""
    job, shop, batches = work.store, work.loader, work.batches()
    begun = [i for i in range(work.depth + 1) if job.has(f"streams.{i}")]
    if begun:
        s = HiddenStates.from_tensors(job.load(f"streams.{begun[-1]}"), batches)
        work.advance(SOLVE_UNITS * begun[-1], "quantising")
    else:
        embedding = shop.load_embedding()
        x = [embedding.forward(batch).contiguous() for batch in batches]
        s, begun = HiddenStates(list(x), list(x), batches), [0]
        job.save("streams.0", s.to_tensors())
    for layer in range(begun[-1], work.depth):
        block = shop.load_layer(layer)
        exact = {role: tap.data for role, tap in shop.linears.items()}
        kept = _saved_gradients(work, str(layer))
        made = streams.solve_layer(
            shop.linears,
            lambda x, batch, block=block: run_block(block, x, batch),  # type: ignore[misc]
            s,
            lambda role, w, h, kept=kept: _solve_matrix(work, recipes, role, w, h, kept.get(role)),  # type: ignore[misc]
            hessian_damping(work),
            _token_weights(kept),
            _residual_roles(work.model.layers[layer], layer),
        )
        streams.advance(shop.linears, exact, lambda x, batch, block=block: run_block(block, x, batch), s)  # type: ignore[misc]
        streams.check_finite(s, f"layers.{layer}")
        _save_matrices(work, f"layer.{layer}", made)
        job.save_json(
            f"layer.{layer}", {"error": s.relative_error(), "bits": {r: w.bits for r, w in made.items()}}
        )
        job.save(f"streams.{layer + 1}", s.to_tensors())
        job.delete(f"streams.{layer}")
        work.advance(SOLVE_UNITS, f"quantising layer {layer}")
    if "head" in work.matrices and not job.has("layer.head"):
        _solve_head(work, recipes, s)
    GRAPHS.clear()
    work.advance(HEAD_UNITS, "quantising the head")


def _solve_head(work: QuantContext, recipes: Mapping[str, Recipe], s: HiddenStates) -> None:
    """The last matrix, its columns in the kinds that `listen` put them into."""
    head, effort = work.loader.load_head(), work.config.solver
    tap, care = work.loader.linears["head"], _saved_gradients(work, "head")[f"head{TOKEN_WEIGHT}"]
    heard = streams.accumulate_clusters(tap, lambda x, batch: head.forward(x, None, batch)[0], s, care)
    exact = tap.data.T.contiguous()
    groups = recipes["head"].groups(len(exact))
    effort = replace(effort, sweeps=2 * effort.sweeps)
    made = solve_head(exact, *heard, _head_clusters(work), groups, effort, hessian_damping(work))
    _save_matrices(work, "layer.head", {"head": made.pack(None if tap.bias is None else tap.bias.half())})


def _head_clusters(work: QuantContext) -> Tensor:
    """(columns, kinds) of the head that was built last."""
    matrix = work.loader.linears["head"].data
    return cluster_columns(matrix, cluster_count(matrix.shape[1], len(matrix)), work.config.seed)


def _saved_gradients(work: QuantContext, name: str) -> dict[str, Tensor]:
    """What `listen` kept of a layer or the head; nothing if it was not asked to."""
    return work.store.load(f"gradients.{name}") if work.store.has(f"gradients.{name}") else {}


def _token_weights(kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By role, how much each token's answer matters."""
    return {
        role.removesuffix(TOKEN_WEIGHT): care for role, care in kept.items() if role.endswith(TOKEN_WEIGHT)
    }


def _residual_roles(layer: spec.Layer, number: int) -> list[str]:
    """Roles whose answers are added to the stream as they are."""
    if layer.residual_scale != 1.0:
        return []
    ends = {"attn.o": layer.attn_post, "mlp.down": layer.mlp_post}
    return [f"layers.{number}.{end}" for end, norm in ends.items() if norm is None]


def hessian_damping(work: QuantContext) -> float:
    """What is added to a Hessian's diagonal, as a share of its mean."""
    wanted = work.config.solver.damping
    return max(wanted, GPTQ_DAMPING) if work.config.method == "gptq" else wanted


def _solve_matrix(
    work: QuantContext,
    recipes: Mapping[str, Recipe],
    role: str,
    w: Tensor,
    h: Tensor,
    gradients: Tensor | None,
) -> tuple[Tensor, PackedWeight]:
    """One matrix rounded, as values and as files have it."""
    effort, bias = work.config.solver, work.loader.linears[role].bias
    half = None if bias is None else bias.half()
    f = factorize(w, h, hessian_damping(work), role)
    if work.config.method == "gptq":
        return solve_gptq(w, f, work.config.group_size, effort.sweeps, half)
    outputs = None
    if gradients is not None:
        outputs = measure.output_factors(gradients.to(w.device).float(), effort.output_damping)
    made = solve_exl2(w, f, recipes[role].groups(len(w)), effort, outputs)
    return made.dequantize(), made.pack(half)


def _save_matrices(work: QuantContext, name: str, made: Mapping[str, PackedWeight]) -> None:
    tensors = {
        f"{role}|{k}": t for role, weight in made.items() for k, t in work.file_tensors(role, weight).items()
    }
    work.store.save(name, tensors)


def stored_tensors(work: QuantContext, role: str) -> dict[str, Tensor]:
    """A quantised matrix's tensors, as `quantise` left them."""
    name = "layer.head" if role == "head" else f"layer.{role.split('.')[1]}"
    tensors = work.store.load(name)
    return {key.partition("|")[2]: t for key, t in tensors.items() if key.partition("|")[0] == role}
