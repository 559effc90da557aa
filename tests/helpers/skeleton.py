"""The configuration that the text of NVIDIA's Triton harness shows, as it stands there."""

from __future__ import annotations

SKELETON = """\
@ConfigRegistry.register(HarnessType.Triton, AccuracyTarget.k_99, PowerSetting.MaxP)
class H100_SXM_80GB_Triton_PP2x1(HopperOfflineGPUBaseConfig):
    system = KnownSystem.YourSystemName
    
    # Required for Triton harness
    use_triton = True
    
    # triton_num_clients_per_frontend: 1 for Offline, (2, 4 or 8) for Server
    triton_num_clients_per_frontend = 1

    # triton_num_frontends_per_model: 1 for Offline, (2, 4 or 8) for Server
    triton_num_frontends_per_model = 1

    # triton_num_servers: 1 for Offline, num_dp_ranks for Server
    triton_num_servers = 1

    # Rest of the config below
    gpu_batch_size = {'model-name': 2048}
    offline_expected_qps = 25
    trtllm_build_flags = {
        'max_num_tokens': 1024,
        'tensor_parallelism': 1,
        'pipeline_parallelism': 2,
    }
    trtllm_runtime_flags = {'max_num_tokens': 1024}
"""  # noqa: W293
