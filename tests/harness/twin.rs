//! Shows the same tree twice at one path: first as a plain directory, which is then moved away, and then as a session's
//! namespace. The output of a program that runs over both can be compared without adjusting paths.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use super::{Cluster, Ground, output_of, pack, text};

/// A session that shows the tree at its old path, and the plain directory at its new path.
pub(crate) struct Twin {
    pub(crate) cluster: Cluster,
    pub(crate) root: PathBuf,
    pub(crate) plain: PathBuf,
}

/// Creates the tree, runs `before` over it as a plain directory, stages it in and moves the plain directory away. Also returns
/// the result of `before`.
pub(crate) fn twin<T>(make: impl FnOnce(&Path), before: impl FnOnce(&Ground, &Path) -> T) -> (Twin, T) {
    twin_with(&[], make, before)
}

/// Like [`twin`], with further options for the session.
pub(crate) fn twin_with<T>(options: &[&str], make: impl FnOnce(&Path), before: impl FnOnce(&Ground, &Path) -> T) -> (Twin, T) {
    let ground = Ground::new();
    let (root, plain) = (ground.at("tree"), ground.at("plain"));
    fs::create_dir(&root).unwrap();
    make(&root);
    let printed = before(&ground, &root);
    let archive = ground.at("tree.tar");
    pack(&archive, &root, &["--format=posix"]);
    let prefix = root.to_str().unwrap().to_owned();
    let cluster = ground.up_with(2, &[&["--prefix", &prefix], options].concat());
    cluster.stage(&[&archive], &prefix);
    fs::rename(&root, &plain).unwrap();
    (Twin { cluster, root, plain }, printed)
}

impl Twin {
    /// Runs a command under `dayfly exec`.
    pub(crate) fn exec(&self, arguments: &[&OsStr]) -> Output {
        output_of(self.exec_command(0).args(arguments))
    }

    pub(crate) fn exec_command(&self, node: u16) -> Command {
        let mut command = self.cluster.dayfly();
        command.args(["exec", "--node", &node.to_string(), "--"]).env("LC_ALL", "C").env("TZ", "UTC");
        command
    }

    /// Runs a shell script, which must succeed, under `dayfly exec`, and returns its output.
    pub(crate) fn shell(&self, words: &str) -> String {
        let output = self.exec(&["sh".as_ref(), "-ec".as_ref(), words.as_ref()]);
        assert!(output.status.success(), "{words}: {}{}", text(&output.stdout), text(&output.stderr));
        text(&output.stdout)
    }
}
