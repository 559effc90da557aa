"""nv-mitten's API under its name: fields, their bindings to parameters, the configuration."""

from __future__ import annotations

from mpillm.options.field import AutoConfStrategy as AutoConfStrategy
from mpillm.options.field import Field as Field
from mpillm.options.field import Options as Options
from mpillm.options.field import Reason as Reason
from mpillm.options.field import option as option
from mpillm.options.mitten import Configuration as Configuration
from mpillm.options.mitten import ConfigurationIndex as ConfigurationIndex
from mpillm.options.mitten import HelpInfo as HelpInfo
from mpillm.options.mitten import autoconfigure as autoconfigure
from mpillm.options.mitten import bind as bind
from mpillm.options.mitten import bound_fields as bound_fields
from mpillm.options.mitten import configured as configured
from mpillm.options.mitten import current as current
from mpillm.options.mitten import environment as environment
from mpillm.options.mitten import in_force as in_force
from mpillm.options.mitten import option_texts as option_texts
from mpillm.options.mitten import parse_fields as parse_fields
