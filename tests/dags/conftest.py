"""The DAGs are loaded with an Airflow home of their own."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

# Before anything imports Airflow: it makes its home where it is first imported.
if "AIRFLOW_HOME" not in os.environ:
    os.environ["AIRFLOW_HOME"] = tempfile.mkdtemp(prefix="refit-test-airflow-")
    atexit.register(shutil.rmtree, os.environ["AIRFLOW_HOME"], ignore_errors=True)
os.environ.setdefault("AIRFLOW__CORE__LOAD_EXAMPLES", "False")
