//! A stand-in for a cluster: hosts that `ssh` seems to reach, and launchers of managers that are not
//! installed here.

use std::fs;
use std::process::Command;

use super::{Cluster, Ground, output_of, permits, text, write_program};

/// A [`Ground`] with a stand-in for `ssh`, which runs commands on this machine and records the host and the calling process. The
/// host `silent` never answers, and the host `broken` cannot be reached.
pub(crate) struct Hosts(pub(crate) Ground);

impl Hosts {
    pub(crate) fn new() -> Self {
        let ground = Ground::new();
        let script = format!(
            r#"#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift 2; done
host=$1; shift
echo "$host $PPID" >> {notes}
case $host in
    silent) exec sleep 100 ;;
    broken) echo "ssh: connect to host broken port 22: No route to host" >&2; exit 255 ;;
esac
exec sh -c "$*"
"#,
            notes = ground.at("notes").display()
        );
        fs::create_dir(ground.at("bin")).unwrap();
        write_program(&ground.at("bin/ssh"), &script);
        Self(ground)
    }

    /// Writes a stand-in for another program. Commands on these hosts find the stand-in in their PATH.
    pub(crate) fn stand_in(&self, program: &str, script: &str) {
        let path = self.0.at("bin").join(program);
        write_program(&path, &format!("#!/bin/sh\n{script}\n"));
    }

    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = self.0.dayfly();
        let path = format!("{}:{}", self.0.at("bin").display(), std::env::var("PATH").unwrap());
        command.env("PATH", path).args(arguments).args(["--memory", "32MiB", "--capacity", "16MiB"]);
        command
    }

    pub(crate) fn up(self, arguments: &[&str]) -> (Cluster, String) {
        let arguments = [&["up"], arguments].concat();
        self.0.hold([permits::take(permits::servers_of(&arguments))]);
        let output = output_of(&mut self.command(&arguments));
        assert!(output.status.success(), "{}", text(&output.stderr));
        let id = text(&output.stdout).trim().to_owned();
        (Cluster { ground: self.0, id }, text(&output.stderr))
    }
}
