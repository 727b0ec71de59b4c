//! Tests of the reads that a sample costs: how many, how long, and of which descriptors.

use super::*;

#[test]
fn a_sample_costs_one_contiguous_read_of_its_record() {
    let folder = tempfile::tempdir().unwrap();
    fill(folder.path());
    shell(folder.path(), "tar -cSf a.tar t");
    python(
        folder.path(),
        "
z = zipfile.ZipFile('b.zip', 'w', zipfile.ZIP_DEFLATED)
z.write('t/a'); z.write('t/sub/b'); z.write('t/sub/deep/c'); z.write('t/sparse'); z.write('t/sub/b', 's', zipfile.ZIP_STORED)
z.close()",
    );
    for source in ["a.tar", "b.zip", "t", "t/sub/b"] {
        let dataset = Dataset::stage_in(&[&folder.path().join(source)], &Selection::default());
        let files = observed();
        let reader = OriginReader::with_files(files.clone(), 1);
        for (path, (sample, expected)) in &dataset.samples {
            assert!(dataset.read(&reader, *sample).unwrap() == *expected);
            let (size, reads) = (expected.len(), take_reads(&files).0);
            if size == 0 {
                assert!(reads.is_empty(), "{path}: an empty sample costs no read");
                continue;
            }
            let (offset, len) = match dataset.catalog.origin(*sample).unwrap().place {
                Place::Bytes { offset } => (offset, size),
                Place::SparseTar { offset, len } | Place::ZipRecord { offset, len } => (offset, len as usize),
                _ => (0, size),
            };
            assert_eq!(reads, [(offset, len)], "{source}: {path}");
        }
    }
}

#[test]
fn a_later_block_of_a_stored_member_is_not_read_through_the_earlier_ones() {
    let folder = tempfile::tempdir().unwrap();
    shell(folder.path(), "seq 1000000 > f; python3 -m zipfile -c a.zip f 2> /dev/null; tar -cf a.tar f");
    python(folder.path(), "z = zipfile.ZipFile('a.zip', 'w'); z.write('f'); z.close()");
    for (name, reads_max) in [("a.tar", 1), ("a.zip", 2)] {
        let dataset = Dataset::stage_in(&[&folder.path().join(name)], &Selection::default());
        let files = observed();
        let reader = OriginReader::with_files(files.clone(), 1);
        let (sample, expected) = &dataset.samples["f"];
        let mut bytes = vec![0; 1000];
        reader.read(&dataset.catalog, WantedBytes { sample: *sample, start: 5_000_000, bytes: &mut bytes }).unwrap();
        assert!(bytes == expected[5_000_000..][..1000]);
        let (reads, _) = take_reads(&files);
        assert!(reads.len() <= reads_max && reads.iter().map(|read| read.1).sum::<usize>() <= 1600, "{name}: {reads:?}");
    }
}

#[test]
fn neighbors_are_read_together_and_distant_samples_are_not() {
    let folder = tempfile::tempdir().unwrap();
    shell(
        folder.path(),
        "mkdir t; for i in {100..199}; do seq $i $((i + 500)) > t/$i; done; head -c 200000 /dev/zero > t/150-gap
         tar -c --sort=name -f a.tar t; cd t; python3 -m zipfile -c ../b.zip *",
    );
    for (name, prefix) in [("a.tar", "t/"), ("b.zip", "")] {
        let dataset = Dataset::stage_in(&[&folder.path().join(name)], &Selection::default());
        let files = observed();
        let reader = OriginReader::with_files(files.clone(), 1);
        // In an order that differs from the order in the source, and one of them twice.
        let mut order: Vec<usize> = (100..200).map(|number| (number * 37) % 100 + 100).collect();
        order.push(142);
        let mut buffers: Vec<Vec<u8>> = Vec::new();
        let paths: Vec<String> = order.iter().map(|number| format!("{prefix}{number}")).collect();
        paths.iter().for_each(|path| buffers.push(vec![0; dataset.samples[path].1.len()]));
        let mut wanted: Vec<_> = buffers
            .iter_mut()
            .zip(&paths)
            .map(|(bytes, path)| WantedBytes { sample: dataset.samples[path].0, start: 0, bytes })
            .collect();
        reader.read_many(&dataset.catalog, &mut wanted).into_iter().for_each(|result| result.unwrap());
        for (path, bytes) in paths.iter().zip(&buffers) {
            assert!(*bytes == dataset.samples[path].1, "{name}: {path}");
        }
        // A zip stores the gap in a few bytes.
        let (reads, opened) = take_reads(&files);
        assert_eq!(reads.len(), if name == "a.tar" { 2 } else { 1 }, "{name}: {reads:?}");
        assert_eq!(opened, 1);
    }
}

#[test]
fn a_merged_read_has_a_bounded_length() {
    let span = |start, len, index| Span { source: 0, bytes: start..start + len, index };
    let lens = |spans: &[Span]| groups(spans).map(<[Span]>::len).collect::<Vec<_>>();
    assert_eq!(lens(&[]), [0; 0]);
    let gap = ORIGIN_GAP_MAX;
    assert_eq!(lens(&[span(0, gap, 0), span(2 * gap, 10, 1)]), [2]);
    assert_eq!(lens(&[span(0, 2 * gap, 0), span(3 * gap + 1, 10, 1)]), [1, 1]);
    assert_eq!(lens(&[span(0, 10, 0), span(30, 10, 1)]), [2], "half of the bytes are wanted");
    assert_eq!(lens(&[span(0, 10, 0), span(31, 10, 1)]), [1, 1]);
    let third = ORIGIN_MERGED_LEN_MAX / 3;
    let many: Vec<Span> = (0..7).map(|index| span(index as u64 * third, third, index)).collect();
    assert_eq!(lens(&many), [3, 3, 1]);
    assert_eq!(lens(&[span(0, 100, 0), span(5, 10, 1), span(90, 20, 2)]), [3], "overlapping spans share a read");
    let other = Span { source: 1, bytes: 10..20, index: 1 };
    assert_eq!(lens(&[span(0, 10, 0), other]), [1, 1]);
}

#[test]
fn at_most_the_given_number_of_descriptors_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let names = ["0", "1", "2"];
    for name in names {
        shell(folder.path(), &format!("mkdir {name}; echo {name} > {name}/a; echo {name} > {name}/b; tar -cf {name}.tar {name}"));
    }
    let datasets = names.map(|name| Dataset::stage_in(&[&folder.path().join(format!("{name}.tar"))], &Selection::default()));
    let files = observed();
    let reader = OriginReader::with_files(files.clone(), 2);
    let read = |number: usize| {
        for path in [format!("{number}/a"), format!("{number}/b")] {
            datasets[number].read(&reader, datasets[number].samples[&path].0).unwrap();
        }
        take_reads(&files).1
    };
    assert_eq!([0, 1, 0, 2, 0, 1, 1].map(read), [1, 1, 0, 1, 0, 1, 0], "the descriptor used longest ago is closed");
    let tree = Dataset::stage_in(&[&folder.path().join("0")], &Selection::default());
    for path in ["a", "b", "a"] {
        tree.read(&reader, tree.samples[path].0).unwrap();
    }
    assert_eq!(take_reads(&files).1, 4, "the root of a tree is opened once");
}
