"""The Spark data source and sink `txnbuffer`; requires the extra `spark`"""
