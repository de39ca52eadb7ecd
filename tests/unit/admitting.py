"""The limits, the workers and the request that the tests of admission start from."""

from pdq.core.admission import Capacity, Request
from pdq.core.load import Rates
from pdq.core.settings import AdmissionSettings

LIMITS = AdmissionSettings(
    interactive_queued_tokens=10_000,
    interactive_queued_requests=20,
    batch_queued_tokens=20_000,
    batch_queued_requests=40,
    batch_share=0.8,
    batch_turn=4,
    decode_overcommit=1.5,
    handoffs_per_prefill_worker=4,
    transfers_per_worker=3,
    tenant_requests=10,
    tenant_reserved_tokens=30_000,
    tenant_weights={"gold": 3.0},
    fair_above=0.5,
    retry_min_s=1.0,
    retry_max_s=60.0,
)
RATES = Rates(
    prefill_tokens_per_s=1_000.0, arrived_tokens_per_s=1_000.0, ended_requests_per_s=2.0, freed_tokens_per_s=500.0
)
CAPACITY = Capacity(prefill_workers=2, decode_workers=2, decode_kv_tokens=40_000, can_start=False, rates=RATES)
SMALL = Request(prompt_tokens=100, max_new_tokens=100)
