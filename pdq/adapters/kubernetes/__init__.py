"""Kubernetes as the actuator. Needs the optional dependencies ``kubernetes``."""

from pdq.adapters.kubernetes.actuator import KubernetesActuator, connect, outline
from pdq.adapters.kubernetes.objects import COST, Request

__all__ = ["COST", "KubernetesActuator", "Request", "connect", "outline"]
