//! Tests that stage in real archives and trees, and read every sample again from its origin.

mod changes;
mod reads;
mod streams;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};

use dayfly_meta::catalog::resolve::{Histories, LinkCollector, Refused};
use dayfly_meta::catalog::{About, CatalogBuilder, EntryId, Member, Source};
use dayfly_meta::path::display;
use dayfly_meta::wire::control::Selection;

use super::fault::{FaultyFiles, SourceCall, SourceFault};
use super::*;
use crate::pipeline::tests::{placement, planned, run};
use crate::tests::noise;

/// A dataset that was staged in.
struct Dataset {
    catalog: Catalog,
    /// The samples' bytes as they were staged in, by path.
    samples: BTreeMap<String, (SampleId, Vec<u8>)>,
}

impl Dataset {
    fn stage_in(paths: &[&Path], selection: &Selection) -> Self {
        Self::stage_in_and(paths, selection, &|_| {})
    }

    /// Stages in these sources, and changes what the catalog says about them.
    fn stage_in_and(paths: &[&Path], selection: &Selection, alter: &dyn Fn(&mut Source)) -> Self {
        let plan = planned(paths, selection).unwrap();
        let mut sources = plan.sources.clone();
        sources.iter_mut().for_each(alter);
        let staged = run(plan, selection, &[1 << 40; 3], 1, &mut |_| 0).unwrap();
        let mut members: Vec<Member> = staged.members.values().map(|(member, _)| member.clone()).collect();
        members.sort_by(Member::run_order);
        let histories = || Histories::new(members.iter().cloned().map(Ok));
        let mut collector = LinkCollector::new(1 << 20);
        members.iter().for_each(|member| collector.see(member).unwrap());
        let links = collector.resolve(histories()).unwrap();
        let about = About { seed: 1, capacities: vec![1; 3], ..About::default() };
        let mut builder = CatalogBuilder::new(&tempfile::tempfile, about, &sources).unwrap();
        let (mut all, mut bytes) = (histories(), BTreeMap::new());
        while let Some(history) = all.advance().unwrap() {
            let path = history.path.clone();
            let Some((member, names)) = links.outcome(history, &mut Refused::default()) else { continue };
            builder.add(&path, &member, names).unwrap();
            bytes.insert(path, staged.members[&member.key].1.clone());
        }
        let catalog = Catalog::open(&builder.finish(&|| {}).unwrap().file).unwrap();
        catalog.check(3).unwrap();
        let sample_at = |path: &[u8]| catalog.find(path).unwrap().sample();
        let samples = bytes.into_iter().filter_map(|(path, bytes)| Some((display(&path), (sample_at(&path)?, bytes)))).collect();
        Self { catalog, samples }
    }

    fn paths(&self) -> Vec<&str> {
        self.samples.keys().map(String::as_str).collect()
    }

    /// Reads a whole sample block by block, and checks its bytes as a caller would.
    fn read<F: SourceFiles>(&self, reader: &OriginReader<F>, sample: SampleId) -> Result<Vec<u8>, OriginError> {
        let (_, blocks) = self.catalog.sample(sample).unwrap();
        let mut whole = Vec::new();
        for block in blocks.map(BlockId) {
            let mut bytes = vec![0; self.catalog.block(block).unwrap().1 as usize];
            reader.read(&self.catalog, WantedBytes::of_block(&self.catalog, block, &mut bytes).unwrap())?;
            check(&self.catalog, block, &bytes)?;
            whole.extend(bytes);
        }
        Ok(whole)
    }

    /// The catalog alone tells how the placement chose the owner of each block.
    fn assert_owners_follow_from_the_catalog(&self) {
        let placement = placement(self.catalog.capacities().count());
        for sample in (0..self.catalog.header().samples).map(SampleId) {
            let path = self.catalog.placed_path(sample).unwrap();
            for (part, block) in (0..).zip(self.catalog.sample(sample).unwrap().1) {
                assert_eq!(
                    self.catalog.owner(BlockId(block)),
                    placement.owner(&path, part, &dayfly_meta::placement::NodeSet::new()),
                    "{}",
                    display(&path)
                );
            }
        }
    }

    /// Reads every sample in all ways, and compares the bytes with those that were staged in.
    fn assert_reads_back(&self) {
        self.assert_owners_follow_from_the_catalog();
        let reader = OriginReader::new(4);
        let mut all: Vec<Vec<u8>> = Vec::new();
        for (path, (sample, expected)) in &self.samples {
            let read = self.read(&reader, *sample).unwrap_or_else(|error| panic!("{path}: {error}"));
            assert!(read == *expected, "{path}");
            let len = expected.len() as u64;
            for (start, end) in [(0, len / 2), (len / 3, len - len / 3), (len / 2, len), (len, len)] {
                let mut bytes = vec![0; (end - start) as usize];
                let wanted = WantedBytes { sample: *sample, start, bytes: &mut bytes };
                reader.read(&self.catalog, wanted).unwrap_or_else(|error| panic!("{path}, {start}..{end}: {error}"));
                assert!(bytes == expected[start as usize..end as usize], "{path}, {start}..{end}");
            }
            let mut beyond = vec![0; expected.len() + 1];
            let wanted = WantedBytes { sample: *sample, start: 0, bytes: &mut beyond };
            assert!(matches!(reader.read(&self.catalog, wanted), Err(OriginError::NotInCatalog)), "{path}");
            all.push(vec![0; expected.len()]);
        }
        let wanted = all.iter_mut().zip(self.samples.values());
        let mut wanted: Vec<_> = wanted.map(|(bytes, (sample, _))| WantedBytes { sample: *sample, start: 0, bytes }).collect();
        reader.read_many(&self.catalog, &mut wanted).into_iter().for_each(|result| result.unwrap());
        for (bytes, (path, (_, expected))) in all.iter().zip(&self.samples) {
            assert!(bytes == expected, "{path}, together with others");
        }
    }
}

/// Runs a shell script in a folder.
fn shell(folder: &Path, script: &str) {
    let output = crate::programs::program("bash").args(["-ec", script]).current_dir(folder).output().unwrap();
    assert!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Runs a Python script that makes zips in a folder.
fn python(folder: &Path, script: &str) {
    let script = format!("import io, sys, zipfile\n{script}\n");
    let output = crate::programs::program("python3").args(["-c", &script]).current_dir(folder).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// The kernel's files, with these faults.
fn faulty(faults: impl Fn(SourceCall) -> Option<SourceFault> + Send + Sync + 'static) -> Arc<FaultyFiles<SystemFiles>> {
    Arc::new(FaultyFiles::new(SystemFiles, Arc::new(faults)))
}

/// The kernel's files without faults, for their list of calls.
fn observed() -> Arc<FaultyFiles<SystemFiles>> {
    faulty(|_| None)
}

/// Returns offset and length of each read, and how many files and directories were opened, since the last call.
fn take_reads(files: &FaultyFiles<SystemFiles>) -> (Vec<(u64, usize)>, usize) {
    let calls = files.take_calls();
    let reads =
        calls.iter().filter_map(|&call| if let SourceCall::Read { offset, len } = call { Some((offset, len)) } else { None });
    (reads.collect(), calls.iter().filter(|&&call| call == SourceCall::Open).count())
}

/// Makes a folder with files of many sizes.
fn fill(folder: &Path) {
    fs::create_dir_all(folder.join("t/sub/deep")).unwrap();
    fs::write(folder.join("t/sub/b"), noise(5000)).unwrap();
    shell(
        folder,
        "cd t
         : > empty; printf one > a; seq 100000 > sub/deep/c
         printf long > sub/$(printf 'n%.0s' {1..200}); ln a hard; ln sub/b sub/0-sorts-first; ln -s a soft
         truncate -s 1M sparse; printf end >> sparse; printf mid | dd of=sparse bs=1 seek=300000 conv=notrunc 2> /dev/null
         for i in {1..30}; do printf x | dd of=pieces bs=1 seek=$((i * 16384)) 2> /dev/null; done",
    );
}

#[test]
fn every_sample_of_a_plain_tar_is_read_back_from_its_origin() {
    for options in [
        "--format=gnu",
        "--format=pax",
        "--format=ustar --exclude=nnn*",
        "--format=gnu --sparse",
        "--format=pax --sparse --sparse-version=0.0",
        "--format=pax --sparse --sparse-version=0.1",
        "--format=pax --sparse --sparse-version=1.0",
        "--format=pax --pax-option=globexthdr.name=g,comment=x,mtime=5",
    ] {
        let folder = tempfile::tempdir().unwrap();
        fill(folder.path());
        shell(folder.path(), &format!("tar -c --sort=name {options} -f a.tar t"));
        let dataset = Dataset::stage_in(&[&folder.path().join("a.tar")], &Selection::default());
        assert!(dataset.samples.len() >= 8, "{options}: {:?}", dataset.paths());
        assert_eq!(dataset.samples["t/hard"].1, b"one", "a hard link's origin is that of its target");
        dataset.assert_reads_back();
        let is_sparse =
            |(sample, _): &(SampleId, Vec<u8>)| matches!(dataset.catalog.origin(*sample).unwrap().place, Place::SparseTar { .. });
        assert_eq!(dataset.samples.values().any(is_sparse), options.contains("--sparse"), "{options}");
    }
}

#[test]
fn every_sample_of_a_zip_is_read_back_from_its_origin() {
    let folder = tempfile::tempdir().unwrap();
    python(
        folder.path(),
        "
def fill(z):
    for method in 'STORED', 'DEFLATED', 'BZIP2':
        for size in 0, 1, 3000, 300000:
            data = bytes(i * i >> 8 & 255 for i in range(size))
            z.writestr(f'{method}/{size}', data, getattr(zipfile, 'ZIP_' + method))
            z.writestr(f'{method}/zeros{size}', bytes(size), getattr(zipfile, 'ZIP_' + method))
    with z.open('zip64', 'w', force_zip64=True) as f: f.write(b'six' * 1000)
    extra = zipfile.ZipInfo('extra'); extra.extra = b'\\x99\\x99' + (1000).to_bytes(2, 'little') + b'e' * 1000
    z.writestr(extra, b'after extra fields')
    z.close()
fill(zipfile.ZipFile('plain.zip', 'w'))
class Stream:
    def __init__(self, f): self.write, self.flush = f.write, f.flush
# A stream cannot seek, so sizes come after the data, in data descriptors.
fill(zipfile.ZipFile(Stream(open('stream.zip', 'wb')), 'w'))
b = io.BytesIO(); fill(zipfile.ZipFile(b, 'w')); open('program.zip', 'wb').write(b'PK\\x03\\x04' + b'#!' * 500 + b.getvalue())",
    );
    for name in ["plain.zip", "stream.zip", "program.zip"] {
        let dataset = Dataset::stage_in(&[&folder.path().join(name)], &Selection::default());
        assert_eq!(dataset.samples.len(), 26, "{name}: {:?}", dataset.paths());
        dataset.assert_reads_back();
    }
}

#[test]
fn every_file_of_a_tree_is_read_back_from_its_origin() {
    let folder = tempfile::tempdir().unwrap();
    fill(folder.path());
    shell(folder.path(), "cp -r t u; ln -s t link; cp t/sub/b single");
    let at = |name: &str| folder.path().join(name);
    let check = |sources: &[&str], selection: &Selection, path: &str| {
        let paths: Vec<_> = sources.iter().map(|name| at(name)).collect();
        let paths: Vec<&Path> = paths.iter().map(|path| path.as_path()).collect();
        let dataset = Dataset::stage_in(&paths, selection);
        assert!(dataset.samples.contains_key(path), "{path}: {:?}", dataset.paths());
        dataset.assert_reads_back();
    };
    let none = Selection::default();
    check(&["t"], &none, "sub/deep/c");
    check(&["link"], &none, "sub/deep/c");
    check(&["t", "u", "single"], &none, "u/sub/deep/c");
    check(&["single"], &none, "single");
    check(&["t"], &Selection { strip_components: 1, ..Selection::default() }, "deep/c");
    check(&["t"], &Selection { include: vec!["*/c".to_owned()], ..Selection::default() }, "sub/deep/c");
    shell(folder.path(), "mkdir v; ln -s ../t/sub v/sub; ln -s ../single v/one");
    let followed = Selection { dereference: true, ..Selection::default() };
    check(&["v"], &followed, "sub/deep/c");
    check(&["t", "v"], &followed, "v/one");
}

#[test]
fn selection_prefixes_and_nesting_do_not_change_where_a_sample_lies() {
    let folder = tempfile::tempdir().unwrap();
    fill(folder.path());
    shell(
        folder.path(),
        "tar -cf in.tar t; mkdir o; cp in.tar o; echo x > o/x; tar -cf a.tar o; (cd t; python3 -m zipfile -c ../b.zip a sub)",
    );
    let (a, b) = (folder.path().join("a.tar"), folder.path().join("b.zip"));
    let strip = Selection { strip_components: 1, exclude: vec!["empty".to_owned()], ..Selection::default() };
    Dataset::stage_in(&[&a, &b], &strip).assert_reads_back();
    let prefix = Dataset::stage_in(&[&a, &b], &Selection { prefix_by_source: true, ..Selection::default() });
    assert!(prefix.samples.contains_key("a/o/in.tar") && prefix.samples.contains_key("b/sub/b"), "{:?}", prefix.paths());
    prefix.assert_reads_back();
    // The members of a plain tar within a plain tar lie in the outer one.
    let nested = Dataset::stage_in(&[&a], &Selection { nested: true, ..Selection::default() });
    assert!(nested.samples.contains_key("o/in/t/sub/deep/c"), "{:?}", nested.paths());
    nested.assert_reads_back();
    // Archives in a tree are sources of their own.
    let tree = Dataset::stage_in(&[&folder.path().join("o")], &Selection { nested: true, ..Selection::default() });
    assert!(tree.samples.contains_key("in/t/a") && tree.samples.contains_key("x"), "{:?}", tree.paths());
    tree.assert_reads_back();
}

#[test]
fn blocks_after_the_first_are_read_back() {
    let folder = tempfile::tempdir().unwrap();
    shell(
        folder.path(),
        "truncate -s 65M large; printf mid | dd of=large bs=1 seek=1000000 conv=notrunc 2> /dev/null
         seq 100000 >> large; tar -cSf sparse.tar large; tar -cf plain.tar large",
    );
    python(
        folder.path(),
        "
for name, method in ('stored.zip', 0), ('deflated.zip', 8):
    z = zipfile.ZipFile(name, 'w', method); z.write('large'); z.close()",
    );
    for name in ["sparse.tar", "plain.tar", "stored.zip", "deflated.zip"] {
        Dataset::stage_in(&[&folder.path().join(name)], &Selection::default()).assert_reads_back();
    }
}

#[test]
fn what_cannot_be_read_yet_says_so() {
    let folder = tempfile::tempdir().unwrap();
    fill(folder.path());
    shell(folder.path(), "tar -czf a.tar.gz t; tar -cf in.tar t/a; gzip -k in.tar; (cd t; python3 -m zipfile -c ../in.zip a)");
    shell(folder.path(), "tar -cf b.tar in.tar.gz in.zip; python3 -m zipfile -c c.zip in.tar");
    let nested = Selection { nested: true, ..Selection::default() };
    for (name, selection) in [("a.tar.gz", &Selection::default()), ("b.tar", &nested), ("c.zip", &nested)] {
        let dataset = Dataset::stage_in(&[&folder.path().join(name)], selection);
        let reader = OriginReader::new(1);
        for (path, (sample, _)) in dataset.samples.iter().filter(|(_, (_, bytes))| !bytes.is_empty()) {
            let error = dataset.read(&reader, *sample).unwrap_err();
            assert!(matches!(&error, OriginError::Unsupported { .. }) && error.to_string().contains(name), "{path}: {error}");
        }
    }
    // The catalog still says which member to unpack.
    let dataset = Dataset::stage_in(&[&folder.path().join("b.tar")], &nested);
    let outer = fs::read(folder.path().join("b.tar")).unwrap();
    for (path, file) in [("in/t/a", "in.tar.gz"), ("in/a", "in.zip")] {
        let Place::Nested { offset, len } = dataset.catalog.origin(dataset.samples[path].0).unwrap().place else {
            panic!("{path} is nested");
        };
        assert!(outer[offset as usize..][..len as usize] == fs::read(folder.path().join(file)).unwrap(), "{path}");
    }
}
