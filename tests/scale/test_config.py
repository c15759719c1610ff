"""Options of the Ray Serve deployments, and that Ray Serve accepts them; nothing is started here."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

import exlm.scale
from exlm import InputError
from exlm.scale import ClusterConfig, Service, bind_application, service_from_config
from exlm.scale.deploy import ingress_options, replica_options
from exlm.serve import ModelSpec
from tests.conftest import ROOT


def test_a_fixed_number_of_replicas() -> None:
    options = replica_options(ClusterConfig.from_replicas("3"))
    assert options["num_replicas"] == 3
    assert "autoscaling_config" not in options
    assert "placement_group_bundles" not in options


def test_a_range_follows_the_queue() -> None:
    scaling = replica_options(ClusterConfig.from_replicas("2..8", queue=5, patience=9.0))["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["max_replicas"]) == (2, 8)
    assert scaling["target_ongoing_requests"] == 5
    assert (scaling["upscale_delay_s"], scaling["downscale_delay_s"]) == (9.0, 90.0)


def test_gpus_of_a_replica_are_in_one_bundle() -> None:
    options = replica_options(ClusterConfig.from_replicas("2", cpus=4, gpus=8, tensor_parallel=8))
    assert options["placement_group_bundles"] == [{"CPU": 4, "GPU": 8}]
    assert options["placement_group_strategy"] == "STRICT_PACK"
    assert options["ray_actor_options"] == {"num_cpus": 4, "num_gpus": 8}  # the replica sees all of them


@pytest.mark.parametrize("text", ["", "0", "8..2", "two", "2-8", "-1", "1..0"])
def test_invalid_numbers_of_replicas(text: str) -> None:
    with pytest.raises(InputError, match="--replicas takes N or LEAST"):
        ClusterConfig.from_replicas(text)


def test_a_model_for_more_gpus_than_there_are() -> None:
    with pytest.raises(InputError, match="shared by 4 GPUs"):
        ClusterConfig(gpus=2, tensor_parallel=4)


@pytest.mark.parametrize(
    "shape",
    [
        ClusterConfig(),
        ClusterConfig(2, 8),
        ClusterConfig(2, 2, gpus=0.5),
        ClusterConfig(1, 4, cpus=8, gpus=4, tensor_parallel=4),
    ],
    ids=str,
)
def test_ray_serve_takes_it(shape: ClusterConfig) -> None:
    serve = pytest.importorskip("ray.serve", reason="needs exlm[scale]")
    deployment = serve.deployment(type("Anything", (), {}), **replica_options(shape))
    assert deployment.max_ongoing_requests == shape.ongoing
    assert deployment.ray_actor_options["num_gpus"] == shape.gpus
    router = deployment._deployment_config.request_router_config
    assert router.get_request_router_class().__name__ == "PrefixRouter"
    assert serve.deployment(type("Anything", (), {}), **ingress_options(shape)).num_replicas == shape.fronts
    assert bind_application(Service(ModelSpec("x"), cluster=shape)) is not None


def test_a_service_from_a_configuration_file(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\n\n two \n")
    settings: dict[str, Any] = {
        "model": "/models/some.gguf",
        "replicas": "2..8",
        "gpus": 2,
        "tensor_parallel": 2,
        "cache_type": "q4",
        "requests": 99,
        "keys_file": str(keys),
        "tenant_requests": 7,
    }
    service = service_from_config(settings)
    assert service.spec == ModelSpec("some", "/models/some.gguf", cache_type="q4")
    assert service.cluster == ClusterConfig(2, 8, gpus=2, tensor_parallel=2)
    assert service.server.limits.requests == 99
    assert service.server.keys == ["one", "two"]
    assert service.tenant_requests == 7
    for wrong in ("modle", "path", "least"):
        with pytest.raises(InputError, match=f"There is no setting {wrong!r}"):
            service_from_config({wrong: 1})


def test_the_manifest_is_a_valid_service(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    schema = pytest.importorskip("ray.serve.schema", reason="needs exlm[scale]")
    manifest = yaml.safe_load((ROOT / "deploy" / "kuberay.yaml").read_text())
    config = schema.ServeDeploySchema(**yaml.safe_load(manifest["spec"]["serveConfigV2"]))
    (application,) = config.applications
    place, _, name = application.import_path.partition(":")
    assert getattr(importlib.import_module(place), name) is exlm.scale.application
    keys = tmp_path / "keys"
    keys.write_text("key\n")
    service = service_from_config({**application.args, "keys_file": str(keys)})
    assert (service.cluster.least, service.cluster.most) == (2, 8)
    (group,) = manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    machine = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert machine["nvidia.com/gpu"] == service.cluster.gpus == service.cluster.tensor_parallel
    assert float(machine["cpu"]) >= service.cluster.cpus
