"A cache of the library `datasets` as the Hub's data sets leave it, for tests."

from datasets import DatasetInfo, SplitDict, SplitInfo
from datasets.arrow_writer import ArrowWriter


def put_in_cache(cache, name, revision, parts, config='default'):
    "writes the parts (name -> Dataset) of a data set into the folder `cache`; returns theirs"
    last = name.split('/')[-1]
    folder = cache / name.replace('/', '___') / config / '0.0.0' / revision
    folder.mkdir(parents=True)
    splits = SplitDict(dataset_name=last)
    for split, part in parts.items():
        with ArrowWriter(path=str(folder / f'{last}-{split}.arrow'), features=part.features) as out:
            out.write_table(part.with_format('arrow')[:])
            out.finalize()
        splits.add(SplitInfo(split, num_examples=len(part), dataset_name=last))
    DatasetInfo(
        features=part.features,
        splits=splits,
        config_name=config,
        dataset_name=last,
        builder_name='parquet',
        version='0.0.0',
    ).write_to_directory(str(folder))
    return folder
