"""The Airflow side: operators, sensors, triggers, backends."""
