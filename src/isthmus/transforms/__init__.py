"""How a feature is computed: declarations as decorators, engines, sources. The only importer of pyspark."""
