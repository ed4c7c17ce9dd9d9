"""The DAGs are loaded with an Airflow home of their own."""

from __future__ import annotations

import os
import tempfile

# Before anything imports Airflow: it makes its home where it is first imported.
os.environ.setdefault("AIRFLOW_HOME", tempfile.mkdtemp(prefix="refit-test-airflow-"))
os.environ.setdefault("AIRFLOW__CORE__LOAD_EXAMPLES", "False")
