//! Tests of stage-ins for which the nodes have too little room.

use super::*;

/// The checksums of each file's chunks, and which of its blocks are stored, by name.
type Files = BTreeMap<String, (Vec<u32>, Vec<bool>)>;

/// Stages in `source`.
fn stage_in(source: &Path, room: &[u64], share: StoredShare) -> Result<Files, StageInError> {
    let selection = Selection { group: Grouping::Stem, ..Selection::default() };
    let sink = MemorySink { stored_share: Some(share), ..MemorySink::new(room) };
    let staged = run_within(planned(&[source], &selection)?, &selection, sink, 1 << 20, 1, &mut |_| 0)?;
    let file = |(member, _): &(Member, Vec<u8>)| match &member.kind {
        MemberKind::File { blocks, checksums, .. } => {
            let first = |part| placement(room.len()).owner(dayfly_meta::path::group(&member.path), part, &NodeSet::new());
            let is_stored = |(part, block): (u32, &StoredBlock)| {
                assert!(block.arrival != NOT_STORED || Some(block.owner) == first(part), "the first candidate owns the block");
                block.arrival != NOT_STORED
            };
            Some((display(&member.path), (checksums.clone(), (0..).zip(blocks).map(is_stored).collect())))
        }
        _ => None,
    };
    Ok(staged.members.values().filter_map(file).collect())
}

fn make_sources(folder: &Path) {
    let tree = folder.join("tree");
    fs::create_dir(&tree).unwrap();
    for number in 0..2000_usize {
        fs::write(tree.join(format!("{number}.jpg")), number.to_string().repeat(700)).unwrap();
        fs::write(tree.join(format!("{number}.txt")), number.to_string()).unwrap();
    }
    for number in 0..20_usize {
        fs::write(tree.join(format!("large-{number}")), vec![number as u8; (5 << 20) + number]).unwrap();
    }
    let run = |command: &str| {
        let done = crate::programs::program("bash").arg("-ec").arg(command).current_dir(folder).status().unwrap();
        assert!(done.success());
    };
    run("tar -cf a.tar -C tree . && gzip -1 -k a.tar && cd tree && python3 -m zipfile -c ../a.zip *");
}

#[test]
fn a_share_of_the_blocks_is_stored_and_all_have_their_checksums() {
    let folder = tempfile::tempdir().unwrap();
    make_sources(folder.path());
    let share = StoredShare::that_fits(3, 10);
    for name in ["tree", "a.tar", "a.zip", "a.tar.gz"] {
        let files = stage_in(&folder.path().join(name), &[1 << 40; 3], share).unwrap();
        assert_eq!(files.len(), 4020);
        for (path, (checksums, stored)) in &files {
            let bytes = fs::read(folder.path().join("tree").join(path)).unwrap();
            let expected: Vec<u32> = bytes.chunks(CHUNK_LEN as usize).map(checksum).collect();
            assert_eq!(*checksums, expected, "{name}: {path}");
            let chosen = share.selects(1, dayfly_meta::path::group(path.as_bytes()), 0);
            assert_eq!(*stored, [chosen || name == "a.tar.gz"], "{name}: {path}");
        }
        let jpg_and_txt = |number: u32| ["jpg", "txt"].map(|ending| &files[&format!("{number}.{ending}")].1);
        assert!((0..2000).all(|number| jpg_and_txt(number)[0] == jpg_and_txt(number)[1]), "one sample is stored together");
    }
}

#[test]
fn blocks_that_find_no_room_stay_unstored_if_they_can_be_read_again() {
    let folder = tempfile::tempdir().unwrap();
    make_sources(folder.path());
    let room = [3 << 20, 20 << 20, 1 << 10];
    for name in ["tree", "a.tar", "a.zip"] {
        let files = stage_in(&folder.path().join(name), &room, StoredShare::ALL).unwrap();
        let stored = files.iter().filter(|(_, (_, stored))| stored[0]);
        let stored_bytes: u64 = stored.map(|(path, _)| fs::metadata(folder.path().join("tree").join(path)).unwrap().len()).sum();
        assert!((15 << 20..23 << 20).contains(&stored_bytes), "{name}: {stored_bytes}");
    }
    let error = stage_in(&folder.path().join("a.tar.gz"), &room, StoredShare::ALL).unwrap_err();
    assert!(matches!(error, StageInError::NoRoom { .. }), "{error}");
}
