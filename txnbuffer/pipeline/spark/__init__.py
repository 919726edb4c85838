"""The Spark side of the pipeline: the data source `txnbuffer`. Needs the extra `spark`; nothing else imports it."""
