"""The API server: how to get there, one function through which every request goes, and what its refusals mean.

Every request has a time limit.
"""

import asyncio
import os
from pathlib import Path
from typing import TypeVar

import msgspec
from aiohttp import ClientError
from kubernetes_asyncio.client import ApiClient, Configuration
from kubernetes_asyncio.client.exceptions import ApiException
from kubernetes_asyncio.config import ConfigException, load_incluster_config, load_kube_config
from kubernetes_asyncio.config.incluster_config import SERVICE_HOST_ENV_NAME
from kubernetes_asyncio.config.kube_config import KUBE_CONFIG_DEFAULT_LOCATION
from yaml import YAMLError

from pdq.adapters.kubernetes.objects import Request, Status
from pdq.core.errors import InvalidSettings, Unavailable
from pdq.core.settings import KubernetesSettings

T = TypeVar("T")


class Conflict(Unavailable):
    """The object is not any more what it was when it was read."""


class Missing(Unavailable):
    """There is no such object."""


class ApiServer:
    def __init__(self, client: ApiClient, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s

    async def read(self, request: Request, kind: type[T]) -> T:
        answer = await self.send(request)
        try:
            return msgspec.convert(answer, kind)
        except msgspec.ValidationError as error:
            raise Unavailable(f"{self._host} answers {request.path} with something else: {error}") from error

    async def send(self, request: Request) -> object:
        headers = {"Accept": "application/json"} | ({"Content-Type": request.content_type} if request.body else {})
        try:
            answer, _, _ = await self._client.call_api(
                request.path,
                request.method,
                query_params=list(request.query.items()),
                header_params=headers,
                body=request.body,
                response_types_map={200: "object"},
                auth_settings=["BearerToken"],
                _request_timeout=self._timeout_s,
            )
        except ApiException as error:
            raise self._refusal(request, error) from error
        except TimeoutError as error:
            raise Unavailable(
                f"the Kubernetes API server {self._host} did not answer within {self._timeout_s:g} s "
                "(PDQ_KUBERNETES_TIMEOUT_S)"
            ) from error
        except (ClientError, OSError, ConfigException, UnicodeDecodeError) as error:
            raise Unavailable(f"the Kubernetes API server {self._host} cannot be asked: {error}") from error
        return answer

    @property
    def _host(self) -> str:
        return str(self._client.configuration.host)

    def _refusal(self, request: Request, error: ApiException) -> Unavailable:
        said = _message(error)
        match error.status:
            case 401:
                return Unavailable(
                    f"{self._host} accepts no such token ({said}): renew that of the kubeconfig or the service account"
                )
            case 403:
                return Unavailable(
                    f"Kubernetes forbids it: {said}. The chart grants these rights to the service account "
                    "<release>-autoscaler with autoscaler.enabled, or autoscaler.rbac for a scaler of your own"
                )
            case 404:
                return Missing(
                    f"Kubernetes does not know {request.path}: {said}. Another release or namespace? See "
                    "PDQ_KUBERNETES_NAMESPACE, PDQ_KUBERNETES_PREFILL_DEPLOYMENT and PDQ_KUBERNETES_DECODE_DEPLOYMENT"
                )
            case 409:
                return Conflict(f"the Deployment changed meanwhile: {said}")
            case status:
                return Unavailable(f"Kubernetes refused {request.method} {request.path} with {status}: {said}")


def _message(error: ApiException) -> str:
    """Of the ``Status`` object that the API server sends with a refusal."""
    try:
        return msgspec.json.decode(error.body or "", type=Status).message
    except msgspec.DecodeError:  # a proxy's page, perhaps
        return str(error.reason)


async def open_client(settings: KubernetesSettings) -> tuple[ApiClient, str]:
    """A client and the namespace: those of the pod's service account; outside of a pod, or if a kubeconfig or context is
    named, those of a kubeconfig.

    Raises:
        InvalidSettings: neither can be used.
    """
    configuration = Configuration()
    try:
        if settings.context or settings.kubeconfig or SERVICE_HOST_ENV_NAME not in os.environ:
            namespace = await _by_kubeconfig(settings, configuration)
        else:
            namespace = _by_service_account(settings, configuration)
        made = ApiClient(configuration)
    except TimeoutError as error:
        raise InvalidSettings(f"the kubeconfig's program gave no token within {settings.timeout_s:g} s") from error
    except (ConfigException, OSError) as error:
        raise InvalidSettings(f"no way to a Kubernetes API server: {error}") from error
    made.user_agent = "pdq"
    return made, namespace


async def _by_kubeconfig(settings: KubernetesSettings, configuration: Configuration) -> str:
    paths = settings.kubeconfig or KUBE_CONFIG_DEFAULT_LOCATION
    if not any(map(_is_file, paths.split(os.pathsep))):
        raise InvalidSettings(
            f"this is no pod, and there is no kubeconfig {paths}: set KUBECONFIG or PDQ_KUBERNETES_KUBECONFIG"
        )
    try:
        async with asyncio.timeout(settings.timeout_s):  # it may call a program that fetches a token
            loader = await load_kube_config(paths, settings.context or None, configuration)
        context = (loader.current_context or {})["context"]
    except (AssertionError, KeyError, TypeError, ValueError, YAMLError) as error:
        raise InvalidSettings(f"kubeconfig {paths} cannot be understood: {error or type(error).__name__}") from error
    return settings.namespace or str(context.get("namespace") or "default")


def _is_file(path: str) -> bool:
    return Path(path).expanduser().is_file()


def _by_service_account(settings: KubernetesSettings, configuration: Configuration) -> str:
    directory = Path(settings.service_account)
    load_incluster_config(
        configuration, token_filename=str(directory / "token"), cert_filename=str(directory / "ca.crt")
    )
    return settings.namespace or (directory / "namespace").read_text().strip()
