//! A tree twice: first as a plain directory, then, gone from its path, as a session's namespace at the same path. What runs over
//! both can be compared without looking at paths.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use super::{Cluster, Ground, output_of, pack, text};

/// A tree, a session that will have it at the same path, and what programs printed over the plain one.
pub(crate) struct Twin {
    pub(crate) cluster: Cluster,
    pub(crate) root: PathBuf,
    pub(crate) plain: PathBuf,
}

/// Makes the tree, runs what `before` runs over it as a plain directory, stages it in and puts the session in its place.
pub(crate) fn twin<T>(make: impl FnOnce(&Path), before: impl FnOnce(&Ground, &Path) -> T) -> (Twin, T) {
    let ground = Ground::new();
    let (root, plain) = (ground.at("tree"), ground.at("plain"));
    fs::create_dir(&root).unwrap();
    make(&root);
    let printed = before(&ground, &root);
    let archive = ground.at("tree.tar");
    pack(&archive, &root, &["--format=posix"]);
    let prefix = root.to_str().unwrap().to_owned();
    let cluster = ground.up_with(2, &["--prefix", &prefix]);
    cluster.stage(&[&archive], &prefix);
    fs::rename(&root, &plain).unwrap();
    (Twin { cluster, root, plain }, printed)
}

impl Twin {
    /// Runs under `dayfly exec`.
    pub(crate) fn exec(&self, arguments: &[&OsStr]) -> Output {
        output_of(self.exec_command(0).args(arguments))
    }

    pub(crate) fn exec_command(&self, node: u16) -> Command {
        let mut command = self.cluster.dayfly();
        command.args(["exec", "--node", &node.to_string(), "--"]).env("LC_ALL", "C").env("TZ", "UTC");
        command
    }

    /// Runs a shell's words under `dayfly exec`, which must succeed; what they print.
    pub(crate) fn shell(&self, words: &str) -> String {
        let output = self.exec(&["sh".as_ref(), "-ec".as_ref(), words.as_ref()]);
        assert!(output.status.success(), "{words}: {}{}", text(&output.stdout), text(&output.stderr));
        text(&output.stdout)
    }
}
