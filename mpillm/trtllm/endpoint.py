"""The cores `trtllm_endpoint` and `trtllm_disagg`: clients of `trtllm-serve` and similar servers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from disagg.errors import ConfigError, about
from mpillm.cores.base import CoreConfig, NumericLimits
from mpillm.cores.clients import DEADLINE_SHARE
from mpillm.cores.openai_client.endpoint_core import EndpointCore
from mpillm.nvidia.configs import TrtllmDisaggEndpointConfig, TrtllmEndpointConfig
from mpillm.options.mitten import configured
from mpillm.stages.start_records import RecordedStarts

if TYPE_CHECKING:
    from mpillm.comms.communicators import InstanceComms
    from mpillm.options.run_config import RunConfig


class TrtllmEndpointCore(EndpointCore):
    """Client of the servers in `--trtllm_server_urls`."""

    engine_stages = "mpillm.trtllm.engines:checkpoint_stages"
    servers = "mpillm.trtllm.servers:endpoint_servers"

    @classmethod
    def settings(cls, config: RunConfig) -> TrtllmEndpointConfig:
        return configured(TrtllmEndpointConfig, config)


class TrtllmDisaggCore(EndpointCore):
    """Client of the leader of `trtllm-serve disaggregated`, whose address is in its YAML."""

    engine_stages = "mpillm.trtllm.engines:checkpoint_stages"
    servers = "mpillm.trtllm.servers:disaggregated_servers"
    disagg_yaml = "mpillm.trtllm.served:disagg_yaml"

    @classmethod
    def settings(cls, config: RunConfig) -> TrtllmDisaggEndpointConfig:
        return configured(TrtllmDisaggEndpointConfig, config)

    def __init__(self, config: CoreConfig, comms: InstanceComms | None = None) -> None:
        super().__init__(config, comms)
        path = config.settings.disagg_config_path
        if path is not None and config.client.server is None:
            self.starts = RecordedStarts(Path(path), DEADLINE_SHARE * self._harness.load_deadline)

    @classmethod
    @about("core_type", "disagg_config")
    def check(cls, config: CoreConfig) -> NumericLimits | None:
        if config.settings.disagg_config_path is None:
            raise ConfigError(
                "--core_type trtllm_disagg needs --trtllm_disagg_config_path: it names the leader"
            )
        return super().check(config)
