"""It has just begun: its own clocks say so."""

import logging
import os
import resource
import time
from pathlib import Path

record = logging.LogRecord("name", logging.INFO, "path", 1, "text", None, None)
ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
up_s = float(Path("/proc/uptime").read_text().split()[0])
age_s = up_s - int(ticks) / os.sysconf("SC_CLK_TCK")
children = resource.getrusage(resource.RUSAGE_CHILDREN)
seen = {
    "processor_s_is_small": time.process_time() < 2,
    "logging_began_with_the_process": record.relativeCreated / 1000 <= age_s + 0.1,
    "children_s": [children.ru_utime, children.ru_stime, os.times().children_user],
    "faults_of_a_start": resource.getrusage(resource.RUSAGE_SELF).ru_nswap,
}
