"""The Kubernetes actuator against a stand-in of the API server: see ``tests/kubernetes_api.py`` for what that is worth."""

import ssl
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from kubernetes_asyncio.client import ApiClient, Configuration

from pdq.adapters.kubernetes import COST, KubernetesActuator, Request, connect
from pdq.core.errors import InvalidSettings, Unavailable, WorkerNotFound
from pdq.core.settings import KubernetesSettings
from pdq.ports import Pool
from tests.contract.chart import MODEL, Rendered
from tests.kubernetes_api import TOKEN, KubernetesApi, Recorded, kubeconfig
from tests.secured import Authority

NAMES = {Pool.PREFILL: "pdq-prefill", Pool.DECODE: "pdq-decode"}


@pytest.fixture
async def api() -> AsyncIterator[KubernetesApi]:
    async with KubernetesApi() as api:
        api.deploy("pdq-prefill", 3)
        api.deploy("pdq-decode", 2)
        yield api


@asynccontextmanager
async def opened(
    api: KubernetesApi, token: str = TOKEN, names: Mapping[Pool, str] = NAMES, **options: Any
) -> AsyncIterator[KubernetesActuator]:
    configuration = Configuration(host=api.url, api_key={"BearerToken": f"Bearer {token}"})
    async with ApiClient(configuration) as client:
        yield KubernetesActuator(client, api.namespace, names, **options)


@pytest.fixture
async def actuator(api: KubernetesApi) -> AsyncIterator[KubernetesActuator]:
    async with opened(api) as actuator:
        yield actuator


def as_requests(recorded: Iterable[Recorded]) -> list[Request]:
    return [Request(it.method, it.path, it.query, it.content_type, it.body) for it in recorded]


# --- Sizes ------------------------------------------------------------------------------------------------------------


async def test_sizes_are_those_of_the_two_deployments(actuator: KubernetesActuator) -> None:
    assert await actuator.sizes() == {Pool.PREFILL: 3, Pool.DECODE: 2}


async def test_a_pool_grows(api: KubernetesApi, actuator: KubernetesActuator) -> None:
    await actuator.scale(Pool.PREFILL, 5, api.running("pdq-prefill"))
    assert len(api.running("pdq-prefill")) == 5
    assert await actuator.sizes() == {Pool.PREFILL: 5, Pool.DECODE: 2}
    assert [request.path.rpartition("/")[2] for request in api.writes] == ["scale"]


async def test_a_pool_that_has_the_size_already_is_left_alone(api: KubernetesApi, actuator: KubernetesActuator) -> None:
    await actuator.scale(Pool.PREFILL, 3, ())
    assert not api.writes


async def test_a_pool_goes_to_zero_and_comes_back(api: KubernetesApi, actuator: KubernetesActuator) -> None:
    await actuator.scale(Pool.DECODE, 0, api.running("pdq-decode"))
    assert not api.running("pdq-decode")
    assert (await actuator.sizes())[Pool.DECODE] == 0
    await actuator.scale(Pool.DECODE, 2, ())
    assert (await actuator.sizes())[Pool.DECODE] == len(api.running("pdq-decode")) == 2


# --- Who goes ---------------------------------------------------------------------------------------------------------


async def test_those_that_are_missed_least_go(api: KubernetesApi, actuator: KubernetesActuator) -> None:
    """Of itself, the controller would take the newest."""
    oldest, middle, newest = api.running("pdq-prefill")
    await actuator.scale(Pool.PREFILL, 1, [middle, oldest, newest])
    assert api.running("pdq-prefill") == [newest]
    assert set(api.leaving("pdq-prefill")) == {oldest, middle}


async def test_costs_are_written_before_the_size_in_the_order_of_leaving(
    api: KubernetesApi, actuator: KubernetesActuator
) -> None:
    oldest, middle, newest = api.running("pdq-prefill")
    await actuator.scale(Pool.PREFILL, 1, [middle, oldest, newest])
    assert [request.path.rpartition("/")[2] for request in api.writes] == [oldest, middle, "scale"]
    assert (api.cost(middle), api.cost(oldest), api.cost(newest)) == ("-2", "-1", None)


async def test_costs_of_a_scaling_that_did_not_come_to_pass_are_taken_back(
    api: KubernetesApi, actuator: KubernetesActuator
) -> None:
    oldest, middle, newest = api.running("pdq-prefill")
    api.rules = [{"apiGroups": ["apps", ""], "resources": ["deployments/scale", "pods"], "verbs": ["get", "list"]}]
    api.rules += [{"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]}]
    with pytest.raises(Unavailable):
        await actuator.scale(Pool.PREFILL, 2, [oldest, middle, newest])
    assert api.cost(oldest) == "-1"
    api.rules = KubernetesApi().rules
    await actuator.scale(Pool.PREFILL, 2, [newest, oldest, middle])
    assert api.running("pdq-prefill") == [oldest, middle]
    assert (api.cost(oldest), api.cost(middle)) == (None, None)


async def test_growth_takes_all_costs_away(api: KubernetesApi, actuator: KubernetesActuator) -> None:
    pod = api.running("pdq-prefill")[0]
    api.pods[pod]["metadata"]["annotations"] = {COST: "-1", "other": "stays"}
    await actuator.scale(Pool.PREFILL, 4, ())
    assert api.pods[pod]["metadata"]["annotations"] == {"other": "stays"}


async def test_a_pod_that_is_not_ready_goes_before_all_others(api: KubernetesApi, actuator: KubernetesActuator) -> None:
    oldest, middle, newest = api.running("pdq-prefill")
    api.unready(newest)
    await actuator.scale(Pool.PREFILL, 1, [oldest, middle])
    assert api.running("pdq-prefill") == [middle]


async def test_a_pod_that_vanishes_meanwhile_is_no_trouble(api: KubernetesApi, actuator: KubernetesActuator) -> None:
    oldest, *others = api.running("pdq-prefill")

    def vanish(request: Recorded) -> None:
        if request.method == "PATCH":
            api.pods.pop(oldest, None)

    api.before = vanish
    await actuator.scale(Pool.PREFILL, 2, [oldest, *others])
    assert api.size("pdq-prefill") == 2


async def test_a_named_worker_goes_for_good(api: KubernetesApi, actuator: KubernetesActuator) -> None:
    first, second = api.running("pdq-decode")
    assert await actuator.remove(first) is Pool.DECODE
    assert api.running("pdq-decode") == [second]
    assert api.size("pdq-decode") == 1
    api.gone(first)
    assert api.running("pdq-decode") == [second]


async def test_a_worker_that_idles_goes_for_good(api: KubernetesApi, actuator: KubernetesActuator) -> None:
    first, second = api.running("pdq-decode")
    api.unready(first)
    await actuator.remove(first)
    assert api.running("pdq-decode") == [second]


async def test_a_worker_that_nobody_knows_is_not_removed(api: KubernetesApi, actuator: KubernetesActuator) -> None:
    with pytest.raises(WorkerNotFound, match="pdq-prefill or pdq-decode"):
        await actuator.remove("elsewhere")
    assert not api.writes


async def test_a_worker_is_not_removed_while_another_one_would_go(
    api: KubernetesApi, actuator: KubernetesActuator
) -> None:
    first, second = api.running("pdq-decode")
    api.unready(second)
    with pytest.raises(Unavailable, match=f"{second} is not ready"):
        await actuator.remove(first)
    api.pods[first]["metadata"]["ownerReferences"][0]["uid"] = "another ReplicaSet"
    with pytest.raises(Unavailable, match="rollout"):
        await actuator.remove(second)
    assert not api.writes


# --- Trouble ----------------------------------------------------------------------------------------------------------


async def test_a_change_by_somebody_else_is_read_before_it_is_tried_again(
    api: KubernetesApi, actuator: KubernetesActuator
) -> None:
    oldest, middle, newest = api.running("pdq-prefill")

    def meanwhile(request: Recorded) -> None:
        if request.path.endswith("/scale") and request.method == "PATCH":
            api.before = lambda request: None
            api.resize("pdq-prefill", 4)

    api.before = meanwhile
    await actuator.scale(Pool.PREFILL, 2, [oldest, middle, newest])
    assert api.size("pdq-prefill") == 2
    assert oldest not in api.running("pdq-prefill")
    assert middle not in api.running("pdq-prefill")


async def test_it_gives_up_on_a_deployment_that_never_stays_the_same(
    api: KubernetesApi, actuator: KubernetesActuator
) -> None:
    api.before = lambda request: api.touch("pdq-prefill")
    with pytest.raises(Unavailable, match="object has been modified"):
        await actuator.scale(Pool.PREFILL, 4, ())
    assert api.size("pdq-prefill") == 3
    assert len(api.writes) == 5


async def test_what_is_forbidden_says_who_grants_it(api: KubernetesApi, actuator: KubernetesActuator) -> None:
    api.rules = []
    with pytest.raises(Unavailable, match=r'cannot get resource "deployments/scale".*autoscaler\.rbac'):
        await actuator.sizes()


async def test_the_rights_that_the_chart_grants_are_enough_and_go_no_further(
    api: KubernetesApi, actuator: KubernetesActuator
) -> None:
    [role] = Rendered({"model": MODEL, "autoscaler": {"rbac": True}}).all("Role").values()
    api.rules = role["rules"]
    for pool in Pool:
        await actuator.scale(pool, 4, ())
        await actuator.scale(pool, 1, api.running(f"pdq-{pool}"))
        assert await actuator.trouble(pool) == ""
    api.deploy("pdq-bridge", 1)
    async with opened(api, names={Pool.PREFILL: "pdq-bridge"}) as other:
        with pytest.raises(Unavailable, match="forbidden"):
            await other.scale(Pool.PREFILL, 2, ())


async def test_a_deployment_that_does_not_exist_names_the_settings(api: KubernetesApi) -> None:
    async with opened(api) as actuator:
        del api.deployments["pdq-decode"]
        with pytest.raises(Unavailable, match=r'"pdq-decode" not found.*PDQ_KUBERNETES_DECODE_DEPLOYMENT'):
            await actuator.sizes()


async def test_a_token_that_is_refused_says_so(api: KubernetesApi) -> None:
    async with opened(api, token="expired") as actuator:
        with pytest.raises(Unavailable, match="accepts no such token"):
            await actuator.sizes()


async def test_an_api_server_that_hangs_does_not_hang_us(api: KubernetesApi) -> None:
    api.silent = True
    async with opened(api, timeout_s=0.2) as actuator:
        with pytest.raises(Unavailable, match=r"did not answer within 0\.2 s"):
            await actuator.sizes()


async def test_an_api_server_that_is_not_there_is_unavailable(api: KubernetesApi) -> None:
    async with opened(api) as actuator:
        await api.__aexit__()
        with pytest.raises(Unavailable, match="cannot be asked"):
            await actuator.sizes()


async def test_what_the_api_server_finds_invalid_is_passed_on(api: KubernetesApi, actuator: KubernetesActuator) -> None:
    with pytest.raises(Unavailable, match="must be greater than or equal to 0"):
        await actuator.scale(Pool.PREFILL, -1, api.running("pdq-prefill"))


async def test_pods_that_do_not_start_say_why(api: KubernetesApi, actuator: KubernetesActuator) -> None:
    api.kubelet = False
    await actuator.scale(Pool.DECODE, 3, ())
    assert "Insufficient nvidia.com/gpu" in await actuator.trouble(Pool.DECODE)
    assert await actuator.trouble(Pool.PREFILL) == ""


async def test_a_container_that_cannot_start_and_a_quota_say_why(
    api: KubernetesApi, actuator: KubernetesActuator
) -> None:
    pod = api.running("pdq-decode")[0]
    waiting = {"reason": "ImagePullBackOff", "message": "no such image"}
    api.pods[pod]["status"]["containerStatuses"] = [{"state": {"waiting": waiting}}]
    assert await actuator.trouble(Pool.DECODE) == f"pod {pod}: ImagePullBackOff: no such image"
    del api.pods[api.running("pdq-prefill")[0]]
    failure = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota: gpus"}
    api.deployments["pdq-prefill"]["status"]["conditions"] = [failure]
    assert await actuator.trouble(Pool.PREFILL) == "exceeded quota: gpus"


# --- Rehearsal --------------------------------------------------------------------------------------------------------


async def test_a_rehearsal_changes_nothing_and_shows_what_a_real_run_sends(api: KubernetesApi) -> None:
    leaving = api.running("pdq-prefill")
    rehearsed: list[Request] = []
    sent: list[Request] = []
    async with opened(api, rehearse=True, on_change=rehearsed.append) as rehearsal:
        await rehearsal.scale(Pool.PREFILL, 1, leaving)
        await rehearsal.scale(Pool.DECODE, 4, ())
    assert not api.writes
    assert (api.size("pdq-prefill"), api.size("pdq-decode")) == (3, 2)
    async with opened(api, on_change=sent.append) as actuator:
        await actuator.scale(Pool.PREFILL, 1, leaving)
        await actuator.scale(Pool.DECODE, 4, ())
    assert as_requests(api.writes) == rehearsed == sent


# --- How to get there -------------------------------------------------------------------------------------------------


async def test_a_kubeconfig_leads_to_the_server_and_names_the_namespace(api: KubernetesApi, tmp_path: Path) -> None:
    settings = KubernetesSettings(kubeconfig=kubeconfig(api, tmp_path / "config", namespace="llm"))
    async with connect(settings) as actuator:
        assert await actuator.sizes() == {Pool.PREFILL: 3, Pool.DECODE: 2}


async def test_another_context_and_another_namespace_can_be_named(api: KubernetesApi, tmp_path: Path) -> None:
    settings = KubernetesSettings(kubeconfig=kubeconfig(api, tmp_path / "config"), namespace="other", context="here")
    async with connect(settings) as actuator:
        with pytest.raises(Unavailable, match="/namespaces/other/"):
            await actuator.sizes()
    async with connect(msgspec.structs.replace(settings, context="away")) as actuator:
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1"):
            await actuator.sizes()


async def test_a_kubeconfig_that_cannot_be_used_is_refused(api: KubernetesApi, tmp_path: Path) -> None:
    good = kubeconfig(api, tmp_path / "config")
    (tmp_path / "broken").write_text("clusters: [")
    (tmp_path / "list").write_text("[]")
    for settings, complaint in (
        (KubernetesSettings(kubeconfig=str(tmp_path / "none")), "no kubeconfig"),
        (KubernetesSettings(kubeconfig=str(tmp_path / "broken")), "cannot be understood"),
        (KubernetesSettings(kubeconfig=str(tmp_path / "list")), "cannot be understood"),
        (KubernetesSettings(kubeconfig=good, context="unknown"), "unknown"),
        (KubernetesSettings(kubeconfig=good, namespace="a/../b"), "a/../b"),
        (KubernetesSettings(kubeconfig=good, decode_deployment="Not A Name"), "Not A Name"),
    ):
        with pytest.raises(InvalidSettings, match=complaint):
            async with connect(settings):
                pass


async def test_a_pod_uses_its_service_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority(tmp_path / "certificates")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority.path("server.pem"), authority.path("server.key"))
    account = tmp_path / "serviceaccount"
    account.mkdir()
    (account / "token").write_text(TOKEN)
    (account / "namespace").write_text("llm\n")
    (account / "ca.crt").symlink_to(authority.path("ca.pem"))
    async with KubernetesApi(tls=context) as api:
        api.deploy("pdq-prefill", 1)
        api.deploy("pdq-decode", 1)
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(api.port))
        async with connect(KubernetesSettings(service_account=str(account))) as actuator:
            assert await actuator.sizes() == {Pool.PREFILL: 1, Pool.DECODE: 1}
        (account / "token").unlink()
        with pytest.raises(InvalidSettings, match="token"):
            async with connect(KubernetesSettings(service_account=str(account))):
                pass


# --- The stand-in itself ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content_type", "patch", "status"),
    [
        ("application/merge-patch+json", '{"spec": {"replicas": 4}}', 200),
        ("application/strategic-merge-patch+json", '{"spec": {"replicas": 4}}', 200),
        ("application/json-patch+json", '[{"op": "replace", "path": "/spec/replicas", "value": 4}]', 200),
        ("application/json", '{"spec": {"replicas": 4}}', 415),
        ("application/merge-patch+json", '{"spec": {"replicas": -1}}', 422),
        ("application/merge-patch+json", '{"spec": {"replicas": "4"}}', 400),
        ("application/merge-patch+json", '{"spec": ', 400),
        ("application/merge-patch+json", '{"metadata": {"resourceVersion": "1"}, "spec": {"replicas": 4}}', 409),
    ],
)
async def test_the_stand_in_judges_patches_as_the_api_reference_says(
    api: KubernetesApi, content_type: str, patch: str, status: int
) -> None:
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {TOKEN}"}) as client:
        url = f"{api.url}/apis/apps/v1/namespaces/llm/deployments/pdq-prefill/scale"
        answer = await client.patch(url, content=patch, headers={"Content-Type": content_type})
    assert answer.status_code == status
    if status == 200:
        assert answer.json()["spec"] == {"replicas": 4}
    else:
        assert (answer.json()["kind"], answer.json()["code"]) == ("Status", status)


async def test_the_stand_in_judges_other_writes_as_the_api_reference_says(api: KubernetesApi) -> None:
    pod = f"/api/v1/namespaces/llm/pods/{api.running('pdq-decode')[0]}"
    scale = "/apis/apps/v1/namespaces/llm/deployments/pdq-decode/scale"
    merge = {"Content-Type": "application/merge-patch+json"}
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {TOKEN}"}, base_url=api.url) as client:
        read = (await client.get(scale)).json()
        assert (await client.put(scale, json={**read, "spec": {"replicas": 0}})).json()["spec"] == {}
        assert (await client.put(scale, json=read)).status_code == 409
        cost = {"metadata": {"annotations": {COST: "0.5"}}}
        assert (await client.patch(pod, json=cost, headers=merge)).status_code == 422
        assert (await client.patch(pod, json={"spec": {"nodeName": "other"}}, headers=merge)).status_code == 422
        assert (await client.delete(pod)).status_code == 405
        assert (await client.get("/apis/apps/v1/namespaces/other/deployments/pdq-decode/scale")).status_code == 404
