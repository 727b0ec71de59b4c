//! Tests in which another local user tries to see or reach what belongs to a session, and another of the owner's processes tries to
//! read the key. These tests need root, to act as several users.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::harness::{self, copy_program, output_of, text, wait_until};
use tempfile::TempDir;

const OWNER: u32 = 65_532;
const STRANGER: u32 = 65_531;

/// Folders that every user may use, like `/tmp` and a node's drive, and a copy of the program that
/// every user may run.
struct Commons {
    folder: TempDir,
}

impl Commons {
    fn new() -> Option<Self> {
        if !nix::unistd::geteuid().is_root() {
            // Written directly, because the test harness captures printed output, and this must be visible.
            use std::io::Write;
            let _ = writeln!(std::io::stderr(), "Other users were NOT simulated: that needs root.");
            return None;
        }
        let folder = tempfile::Builder::new().prefix("df").tempdir().unwrap();
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        for name in ["run", "drive"] {
            fs::create_dir(folder.path().join(name)).unwrap();
            fs::set_permissions(folder.path().join(name), fs::Permissions::from_mode(0o1777)).unwrap();
        }
        let program = Path::new(env!("CARGO_BIN_EXE_dayfly"));
        copy_program(program, folder.path().join("dayfly"));
        copy_program(program.with_file_name("deps").join("libdayfly_preload.so"), folder.path().join("libdayfly_preload.so"));
        Some(Self { folder })
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn run(&self, user: u32, program: &Path, arguments: &[&str]) -> Output {
        let mut command = harness::program("setpriv");
        command.args([&format!("--reuid={user}"), &format!("--regid={user}"), "--clear-groups"]).arg(program).args(arguments);
        command.env("DAYFLY_RUNTIME_DIR", self.at("run")).env("TMPDIR", self.at("drive")).env_remove("DAYFLY_SESSION");
        output_of(command.current_dir("/"))
    }

    fn dayfly(&self, user: u32, arguments: &[&str]) -> Output {
        self.run(user, &self.at("dayfly"), arguments)
    }

    /// Runs a line of Python as a user. Returns `done`, or `refused` if the kernel denies
    /// permission.
    fn python(&self, user: u32, script: &str, path: &Path) -> String {
        let script = format!(
            "import os, socket, sys\npath = sys.argv[1]\ntry:\n    {script}\n    print('done')\nexcept PermissionError:\n    print('refused')"
        );
        let output = self.run(user, Path::new("/usr/bin/python3"), &["-c", &script, path.to_str().unwrap()]);
        assert!(output.status.success(), "{script}: {}", text(&output.stderr));
        text(&output.stdout).trim().to_owned()
    }
}

impl Drop for Commons {
    fn drop(&mut self) {
        // If the test failed, its session still runs.
        drop(self.dayfly(OWNER, &["down"]));
    }
}

#[test]
fn another_user_sees_and_reaches_nothing() {
    let Some(commons) = Commons::new() else { return };
    fs::write(commons.at("sample"), "secret").unwrap();
    let shared_memory = || fs::read_dir("/dev/shm").map(|entries| entries.count()).unwrap_or(0);
    let before = shared_memory();
    let up = commons.dayfly(OWNER, &["up", "--local", "2"]);
    assert!(up.status.success(), "{}", text(&up.stderr));
    let staged = commons.dayfly(OWNER, &["stage-in", commons.at("sample").to_str().unwrap(), "/dayfly/d"]);
    assert!(staged.status.success(), "{}", text(&staged.stderr));
    let user = commons.at(&format!("run/dayfly-{OWNER}"));
    let folder = user.join(text(&up.stdout).trim());
    assert_eq!(shared_memory(), before, "shared memory has no names");
    let mut tried = 0;
    let mut check = |script: &str, path: &Path| {
        // The owner may do this; otherwise the refusal below would prove nothing.
        if !path.starts_with("/proc") {
            assert_eq!(commons.python(OWNER, script, path), "done", "{script} {}", path.display());
        }
        assert_eq!(commons.python(STRANGER, script, path), "refused", "{script} {}", path.display());
        tried += 1;
    };
    for folder in [&user, &folder, &commons.at(&format!("drive/dayfly-{OWNER}"))] {
        check("os.listdir(path)", folder);
    }
    check("socket.socket(socket.AF_UNIX).connect(path)", &folder.join("node-0.sock"));
    for name in ["node-0.lock", "node-0.log", "supervisor.lock", "supervisor.log", "data-dirs"] {
        check("open(path).read()", &folder.join(name));
    }
    let pid = |name: &str| fs::read_to_string(folder.join(name)).unwrap().trim().to_owned();
    for pid in [pid("node-0.lock"), pid("supervisor.lock")] {
        let process = PathBuf::from(format!("/proc/{pid}"));
        for file in ["environ", "maps", "mem", "auxv"] {
            check("open(path, 'rb').read(1)", &process.join(file));
        }
        for file in ["cwd", "root", "exe"] {
            check("os.readlink(path)", &process.join(file));
        }
        check("os.listdir(path)", &process.join("fd"));
        // Among these are segments, catalogs and the arena.
        for descriptor in fs::read_dir(process.join("fd")).unwrap() {
            check("os.open(path, os.O_RDONLY)", &descriptor.unwrap().path());
        }
        check("os.kill(int(path.split('/')[2]), 0)", &process);
        // Processes that have the key are protected even from other processes of the owner, and
        // write no core file.
        assert_eq!(fs::metadata(process.join("environ")).unwrap().uid(), 0, "the process can be dumped");
        for file in ["environ", "mem", "maps"] {
            assert_eq!(commons.python(OWNER, "open(path, 'rb').read(1)", &process.join(file)), "refused", "{file}");
        }
    }
    assert!(tried > 50, "{tried}");
    let named = fs::read_to_string("/proc/net/unix").unwrap();
    assert!(!named.lines().any(|line| line.contains('@') && line.contains("dayfly")), "there is no abstract socket");
    // The stranger's commands find only the stranger's own sessions.
    let down = commons.dayfly(STRANGER, &["down"]);
    assert!(text(&down.stdout).contains("nothing to do"), "{}", text(&down.stderr));
    // Root sees the session, and is told whose it is.
    let mut down = Command::new(commons.at("dayfly"));
    down.arg("down").env("DAYFLY_RUNTIME_DIR", commons.at("run")).env("DAYFLY_SESSION", text(&up.stdout).trim());
    let down = output_of(&mut down);
    assert_eq!(down.status.code(), Some(1), "{}", text(&down.stdout));
    assert!(text(&down.stderr).contains(&format!("a session of user {OWNER}; only that user")), "{}", text(&down.stderr));
    assert!(commons.dayfly(OWNER, &["down"]).status.success());
    wait_until("nothing is left", || fs::read_dir(commons.at("run")).unwrap().next().is_none());
    assert!(fs::read_dir(commons.at("drive")).unwrap().next().is_none());
}

#[test]
fn a_folder_that_another_user_made_first_is_not_used() {
    let Some(commons) = Commons::new() else { return };
    let traps = [
        ("os.mkdir(path); os.chmod(path, 0o777)", "belongs to user 65531"),
        ("os.mkdir(path); os.chmod(path, 0o700)", "belongs to user 65531"),
        ("os.mkdir(path); os.chmod(path, 0)", "belongs to user 65531"),
        ("open(path, 'w').close()", "is not a directory; it belongs to user 65531"),
        ("os.mkfifo(path)", "is not a directory; it belongs to user 65531"),
        // A symbolic link is not followed.
        (
            "os.mkdir(path + '-x'); os.chmod(path + '-x', 0o777); os.symlink(path + '-x', path)",
            "is a symbolic link; it belongs to user 65531",
        ),
    ];
    for (place, way_out) in [("run", "set DAYFLY_RUNTIME_DIR"), ("drive", "with --data-dir")] {
        let trap = commons.at(&format!("{place}/dayfly-{OWNER}"));
        for (script, what) in traps {
            assert_eq!(commons.python(STRANGER, script, &trap), "done");
            for command in ["up", "clean"] {
                let output = commons.dayfly(OWNER, &[command]);
                let message = text(&output.stderr);
                if command == "clean" && place == "drive" {
                    assert!(output.status.success(), "nothing in it belongs to the owner: {message}");
                    continue;
                }
                assert!(!output.status.success(), "{script}: {message}");
                for word in [trap.to_str().unwrap(), "is not a private folder of yours", what, way_out, "only user 65531 or root"]
                {
                    assert!(message.contains(word), "{script}: no '{word}' in: {message}");
                }
                assert!(!message.contains("; or "), "'; or' must follow another remedy: {message}");
            }
            if trap.is_dir() {
                assert_eq!(fs::read_dir(&trap).unwrap().count(), 0, "nothing was put into it");
            }
            for path in [&trap, &commons.at(&format!("{place}/dayfly-{OWNER}-x"))] {
                let _ = fs::remove_file(path).or_else(|_| fs::remove_dir(path));
            }
        }
        // This is the owner's own folder, which others may enter.
        assert_eq!(commons.python(OWNER, "os.mkdir(path); os.chmod(path, 0o755)", &trap), "done");
        let message = text(&commons.dayfly(OWNER, &["up"]).stderr);
        assert!(
            message.contains("its mode is 0755") && message.contains("'chmod 700'") && !message.contains("only user"),
            "{message}"
        );
        fs::remove_dir(&trap).unwrap();
    }
    // If there is a FIFO in the place of a node's folder, the cleanup must not open it, because
    // that would block.
    let trap = commons.at(&format!("drive/dayfly-{OWNER}"));
    commons.python(
        STRANGER,
        "os.makedirs(path + '/0123456789abcdef'); os.mkfifo(path + '/0123456789abcdef/node-0'); os.chmod(path, 0o755)",
        &trap,
    );
    assert!(commons.dayfly(OWNER, &["clean"]).status.success());
}

#[test]
fn a_session_whose_folder_cannot_be_searched_is_not_taken_for_dead() {
    let Some(commons) = Commons::new() else { return };
    let up = commons.dayfly(OWNER, &["up", "--local", "1"]);
    assert!(up.status.success(), "{}", text(&up.stderr));
    let id = text(&up.stdout).trim().to_owned();
    let folder = commons.at(&format!("run/dayfly-{OWNER}/{id}"));
    let mode = |mode: u32| fs::set_permissions(&folder, fs::Permissions::from_mode(mode)).unwrap();
    for mask in [0o000, 0o300, 0o400, 0o600] {
        mode(mask);
        for command in ["status", "down", "clean", "up"] {
            let output = commons.dayfly(OWNER, &[command]);
            let message = text(&output.stderr);
            assert!(!output.status.success(), "{mask:o} {command}: {}", text(&output.stdout));
            assert!(
                message.contains("cannot tell whether the session in") && message.contains("'chmod 700' lets you"),
                "{mask:o} {command}: {message}"
            );
        }
    }
    mode(0o700);
    let down = commons.dayfly(OWNER, &["down"]);
    assert!(text(&down.stdout).contains("1 node ended"), "{}", text(&down.stderr));
}

#[test]
fn a_folder_that_others_could_move_away_is_refused() {
    let Some(commons) = Commons::new() else { return };
    let mode = |place: &str, mode: u32| fs::set_permissions(commons.at(place), fs::Permissions::from_mode(mode)).unwrap();
    for (place, way_out) in [("run", "set DAYFLY_RUNTIME_DIR"), ("drive", "with --data-dir")] {
        mode(place, 0o777);
        let up = commons.dayfly(OWNER, &["up"]);
        let message = text(&up.stderr);
        assert!(!up.status.success(), "{message}");
        for word in [commons.at(place).to_str().unwrap(), "no sticky bit (mode 0777)", "'chmod +t'", way_out] {
            assert!(message.contains(word), "no '{word}' in: {message}");
        }
        mode(place, 0o1777);
        // A folder that the owner may not write to.
        mode(place, 0o755);
        let up = commons.dayfly(OWNER, &["up"]);
        let message = text(&up.stderr);
        assert!(!up.status.success() && message.contains(commons.at(place).to_str().unwrap()), "{message}");
        assert!(message.contains("Permission denied") && message.contains(way_out), "{message}");
        mode(place, 0o1777);
    }
    // The owner's own folder inside a folder that is open to others works, with a warning.
    let own = commons.at("drive/own");
    assert_eq!(commons.python(OWNER, "os.mkdir(path, 0o700)", &own), "done");
    mode("drive", 0o777);
    let up = commons.dayfly(OWNER, &["up", "--data-dir", own.to_str().unwrap()]);
    assert!(up.status.success() && text(&up.stderr).contains("may be moved by others"), "{}", text(&up.stderr));
    assert!(commons.dayfly(OWNER, &["down"]).status.success());
    assert_eq!(fs::read_dir(&own).unwrap().count(), 0);
}
