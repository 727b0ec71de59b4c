//! Tests that the catalog of a session's dataset leads back to the sources.

use std::fs;

use crate::harness::{self, Ground, pack, text};
use dayfly_meta::id::{BlockId, SampleId};
use dayfly_stagein::origin::{OriginError, OriginReader, WantedBytes, check};

harness::with_few_and_many_workers! {
    every_block_of_a_session_is_read_back_from_its_origin,
}

fn every_block_of_a_session_is_read_back_from_its_origin() {
    let ground = Ground::new();
    fs::create_dir(ground.at("tree")).unwrap();
    for number in 0..300_usize {
        let size = [0, 100, 5000, 70_000][number % 4];
        fs::write(ground.at(format!("tree/{number}")), number.to_string().repeat(size)).unwrap();
    }
    fs::hard_link(ground.at("tree/7"), ground.at("tree/0-link")).unwrap();
    pack(&ground.at("a.tar"), &ground.at("tree"), &[]);
    let cluster = ground.up(3);
    for source in ["a.tar", "tree"] {
        let path = format!("/dayfly/{source}");
        cluster.ok(&["stage-in", source, &path]);
        let view = cluster.view(0);
        let dataset = view.dataset_of(path.as_bytes()).unwrap();
        let catalog = dataset.catalog();
        assert!(catalog.capacities().count() == 3 && catalog.capacities().all(|capacity| capacity > 0));
        let read = |reader: &OriginReader, block: BlockId| -> Result<(), OriginError> {
            let mut bytes = vec![0; catalog.block(block).unwrap().1 as usize];
            reader.read(catalog, WantedBytes::of_block(catalog, block, &mut bytes).unwrap())?;
            check(catalog, block, &bytes)
        };
        let reader = OriginReader::new(2);
        assert!(catalog.header().blocks > 200);
        for block in (0..catalog.header().blocks).map(BlockId) {
            read(&reader, block).unwrap_or_else(|error| panic!("{source}: {error}"));
        }
        for sample in (0..catalog.header().samples).map(SampleId) {
            assert!(
                catalog.entry_of(sample).is_some_and(|entry| text(entry.name).starts_with(|first: char| first.is_ascii_digit()))
            );
        }
        fs::rename(cluster.at(source), cluster.at("moved")).unwrap();
        let error = read(&OriginReader::new(2), BlockId(0)).unwrap_err();
        assert!(matches!(error, OriginError::Missing { .. }) && error.to_string().contains(source), "{error}");
        fs::rename(cluster.at("moved"), cluster.at(source)).unwrap();
    }
    cluster.down();
}
