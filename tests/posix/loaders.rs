//! What the dynamic linker loads, and programs for which this library was not made: they start all the same.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{compile, plainly};
use crate::harness::programs::missing;
use crate::harness::twin::{Twin, twin};
use crate::harness::{is_installed, output_of, skip, text, tool};

fn shared(folder: &Path, name: &str, source: &str, options: &[&str]) {
    let file = folder.join(format!("{}.c", name.replace('/', "-")));
    let library = folder.join(name);
    fs::create_dir_all(library.parent().unwrap()).unwrap();
    fs::write(&file, source).unwrap();
    let mut arguments: Vec<&OsStr> =
        vec!["-shared".as_ref(), "-fPIC".as_ref(), "-o".as_ref(), library.as_os_str(), file.as_os_str()];
    arguments.extend(options.iter().map(OsStr::new));
    tool("gcc", &arguments);
    fs::remove_file(file).unwrap();
}

/// Creates the libraries that `loaders.c` loads.
fn libraries(root: &Path) {
    shared(root, "one.so", "static int count; int count_one(void) { return ++count; }", &["-Wl,-soname,one.so"]);
    shared(root, "alone.so", "int alone(void) { return 7; }", &["-nostdlib"]);
    std::os::unix::fs::symlink("one.so", root.join("link.so")).unwrap();
    fs::write(root.join("not-a-library"), "some words\n").unwrap();
    let needed = root.join("needed");
    let (here, folder) = (format!("-L{}", needed.display()), "-Wl,-rpath,$ORIGIN");
    let link = |name: &str| format!("-Wl,-soname,{name}");
    shared(&needed, "libthree.so", "int three(void) { return 3; }", &[&link("libthree.so")]);
    let source = "int three(void); int two(void) { return three() - 1; }";
    shared(&needed, "libtwo.so", source, &[&link("libtwo.so"), &here, "-lthree", folder]);
    let source = "int two(void); int three(void); int sum(void) { return 10 * two() + three(); }";
    shared(
        root,
        "sub/user.so",
        source,
        &[&here, "-ltwo", "-Wl,-rpath-link", &needed.display().to_string(), "-lthree", "-Wl,-rpath,$ORIGIN/../needed"],
    );
}

/// SEMANTICS: "dlopen loads libraries of the namespace, and the libraries that these need, whether they are outside the namespace
/// or in folders of the namespace that DT_RUNPATH or DT_RPATH names."
#[test]
fn dlopen_loads_libraries_from_the_namespace_as_from_a_plain_directory() {
    let outside = |folder: &Path| {
        shared(folder, "libneighbor.so", "int neighbor(void) { return 41; }", &[]);
        let source = "#include <dlfcn.h>\n int load_neighbor(void) { void *handle = dlopen(\"libneighbor.so\", RTLD_NOW);\n\
                      return handle ? ((int (*)(void))dlsym(handle, \"neighbor\"))() + 1 : -2; }";
        shared(folder, "outside.so", source, &["-Wl,-rpath,$ORIGIN"]);
        folder.join("outside.so")
    };
    let (twin, expected) = twin(libraries, |ground, root| {
        let program = compile(ground, "loaders.c", &["-ldl"]);
        let found = plainly(ground, &[program.as_os_str(), root.as_os_str(), outside(ground.work.path()).as_os_str()]);
        text(&found.stdout)
    });
    assert!(expected.contains("counts 1 2") || expected.contains("counts 2 1"), "{expected}");
    assert!(expected.contains("of the needed ones 23") && expected.contains("from outside 42"), "{expected}");
    let program = twin.cluster.at("loaders");
    for node in 0..2 {
        let mut command = twin.exec_command(node);
        let found = output_of(command.arg(&program).arg(&twin.root).arg(twin.cluster.at("outside.so")));
        assert_eq!(text(&found.stdout), expected, "node {node}: {}", text(&found.stderr));
    }
    twin.cluster.down();
}

/// SEMANTICS: "Python imports modules from the namespace, extension modules included."
#[test]
fn python_imports_extension_modules_from_the_namespace() {
    if !is_installed("python3") {
        return;
    }
    // Copies extension modules of the interpreter's own library. The script below takes that library's folder off the search path,
    // so that Python finds only the copies.
    let copy = "import sys, sysconfig, glob, shutil\n\
                folder = sysconfig.get_config_var('DESTSHARED')\n\
                for name in ['_csv', '_json', '_struct', '_heapq']:\n\
                \x20   for path in glob.glob(f'{folder}/{name}.*.so'): shutil.copy(path, sys.argv[1])\n\
                open(sys.argv[1] + '/plain.py', 'w').write('answer = 42\\n')";
    let script = "import sys, sysconfig\n\
                  sys.path = [sys.argv[1]] + [path for path in sys.path if 'lib-dynload' not in path]\n\
                  for name in ['_csv', '_json', '_struct', '_heapq', 'plain']:\n\
                  \x20   sys.modules.pop(name, None)\n\
                  \x20   module = __import__(name)\n\
                  \x20   print(name, getattr(module, '__file__', None), len(dir(module)))\n";
    let (twin, expected) = twin(
        |root| tool("python3", &["-c".as_ref(), copy.as_ref(), root.as_os_str()]),
        |ground, root| text(&plainly(ground, &["python3".as_ref(), "-Bc".as_ref(), script.as_ref(), root.as_os_str()]).stdout),
    );
    assert!(expected.contains("plain.py"), "{expected}");
    if !expected.contains("_csv.") {
        eprintln!("this Python has no extension modules as files");
    }
    let found = twin.exec(&["python3".as_ref(), "-Bc".as_ref(), script.as_ref(), twin.root.as_os_str()]);
    assert_eq!(text(&found.stdout), expected, "{}", text(&found.stderr));
    twin.cluster.down();
}

/// SEMANTICS: "Python imports modules from the namespace, extension modules included."
#[test]
fn python_imports_packages_that_bring_their_own_libraries() {
    if !is_installed("python3 -c 'import numpy'") || !is_installed("python3 -c 'import PIL'") {
        return;
    }
    let copy = "import os, shutil, sys, numpy, PIL\n\
                for module in [numpy, PIL]:\n\
                \x20   folder = os.path.dirname(module.__file__)\n\
                \x20   for name in [folder, folder.replace('PIL', 'pillow') + '.libs']:\n\
                \x20       if os.path.isdir(name): shutil.copytree(name, os.path.join(sys.argv[1], os.path.basename(name)))\n";
    let script = "import sys; sys.path.insert(0, sys.argv[1])\n\
                  import numpy\n\
                  from PIL import Image\n\
                  matrix = numpy.eye(100) * 4\n\
                  print(numpy.__file__, Image.__file__, numpy.linalg.inv(matrix).sum(), (matrix @ matrix).trace())\n\
                  picture = Image.linear_gradient('L')\n\
                  print(len(picture.tobytes('jpeg', 'L')), picture.resize((9, 9)).getpixel((4, 4)))\n";
    let (twin, expected) = twin(
        |root| tool("python3", &["-c".as_ref(), copy.as_ref(), root.as_os_str()]),
        |ground, root| text(&plainly(ground, &["python3".as_ref(), "-SBc".as_ref(), script.as_ref(), root.as_os_str()]).stdout),
    );
    assert!(expected.contains("numpy/__init__.py"), "{expected}");
    let found = twin.exec(&["python3".as_ref(), "-SBc".as_ref(), script.as_ref(), twin.root.as_os_str()]);
    assert_eq!(text(&found.stdout), expected, "{}", text(&found.stderr));
    twin.cluster.down();
}

/// A program that reads a file and lists a folder. A sanitizer, if the program is built with one, finds its mistakes in memory.
const READER: &str = "#include <dirent.h>\n#include <fcntl.h>\n#include <stdio.h>\n#include <string.h>\n#include <unistd.h>\n\
    int main(int count, char **arguments) {\n\
        char line[100] = \"\";\n\
        int file = open(arguments[1], O_RDONLY);\n\
        if (read(file, line, sizeof line - 1) < 0) perror(\"read\");\n\
        printf(\"%s\", line);\n\
        FILE *stream = fopen(arguments[1], \"r\");\n\
        printf(\"%s\", stream && fgets(line, sizeof line, stream) ? line : \"no stream\\n\");\n\
        DIR *folder = opendir(count > 2 ? arguments[2] : \"/\");\n\
        printf(\"%d\\n\", folder && readdir(folder));\n\
        return 0;\n\
    }\n";

/// Compiles [`READER`]; `None` if the compiler cannot.
fn reader(twin: &Twin, compiler: &str, options: &[&str]) -> Option<PathBuf> {
    let (source, program) = (twin.cluster.at("reader.c"), twin.cluster.at(format!("reader-{compiler}{}", options.concat())));
    fs::write(&source, READER).unwrap();
    let built = Command::new(compiler).args(options).arg("-o").args([&program, &source]).output();
    let is_built = built.is_ok_and(|output| output.status.success());
    if !is_built {
        skip(&missing(&[&[compiler], options].concat().join(" ")));
    }
    is_built.then_some(program)
}

fn words_in(root: &Path) {
    fs::write(root.join("words"), "some words\n").unwrap();
}

/// SEMANTICS: "Programs of musl and 32-bit programs run as they would without the library, without a message, and do not see the
/// namespace. Such a program as CMD causes a warning."
#[test]
fn programs_of_musl_and_32_bit_programs_run_as_without_the_library() {
    let (twin, ()) = twin(words_in, |_, _| ());
    for (compiler, options, reason) in [("musl-gcc", &[][..], "musl"), ("gcc", &["-m32"], "a 32-bit program")] {
        let Some(program) = reader(&twin, compiler, options) else { continue };
        let outside = twin.plain.join("words");
        let script = format!("{} {}; echo $?; cat {}/words", program.display(), outside.display(), twin.root.display());
        let found = twin.exec(&["sh".as_ref(), "-c".as_ref(), script.as_ref()]);
        assert_eq!(text(&found.stdout), "some words\nsome words\n1\n0\nsome words\n");
        assert_eq!(text(&found.stderr), "", "a shell's children print nothing");
        let found = twin.exec(&[program.as_os_str(), outside.as_os_str()]);
        assert_eq!(text(&found.stdout), "some words\nsome words\n1\n");
        let warning = text(&found.stderr);
        assert!(
            warning.contains(reason) && warning.contains("will not see the namespace") && warning.lines().count() == 1,
            "{warning}"
        );
    }
    twin.cluster.down();
}

/// SEMANTICS: "Programs built with a sanitizer of gcc (address, leak, thread, undefined) start, and see the namespace."
#[test]
fn programs_built_with_sanitizers_read_the_namespace() {
    let (twin, ()) = twin(words_in, |_, _| ());
    for sanitizer in ["address", "leak", "thread", "undefined"] {
        let Some(program) = reader(&twin, "gcc", &[&format!("-fsanitize={sanitizer}")]) else { continue };
        let file = twin.root.join("words");
        // The program leaves its stream and folder open.
        let mut command = twin.exec_command(0);
        command
            .arg(&program)
            .args([&file, &twin.root])
            .env("ASAN_OPTIONS", "detect_leaks=0")
            .env("LSAN_OPTIONS", "detect_leaks=0");
        let found = output_of(&mut command);
        assert_eq!(text(&found.stdout), "some words\nsome words\n1\n", "{sanitizer}: {}", text(&found.stderr));
        assert!(found.status.success() && found.stderr.is_empty(), "{sanitizer}: {}", text(&found.stderr));
    }
    twin.cluster.down();
}

/// SEMANTICS: "Other preloaded libraries, before this one or after it, see the calls that lead outside the namespace."
#[test]
fn a_library_like_fakeroots_works_before_this_library_and_after_it() {
    if !is_installed("python3") {
        return;
    }
    let (twin, ()) = twin(words_in, |_, _| ());
    let interposer = twin.cluster.at("interposer.so");
    let source = super::here("interposer.c");
    tool("gcc", &["-shared".as_ref(), "-fPIC".as_ref(), "-o".as_ref(), interposer.as_os_str(), source.as_os_str()]);
    let script = "import os, sys\n\
                  outside, inside = open(sys.argv[1]), open(sys.argv[2])\n\
                  print(os.fstat(outside.fileno()).st_uid, os.stat(sys.argv[1]).st_uid, os.stat('words', dir_fd=os.open(sys.argv[3], 0)).st_uid)\n\
                  print(os.fstat(inside.fileno()).st_size, os.stat(sys.argv[2]).st_size, inside.read(), end='')\n";
    let me = nix::unistd::getuid();
    for order in ["$0:$LD_PRELOAD", "$LD_PRELOAD:$0"] {
        let run = format!("LD_PRELOAD={order} exec \"$@\"");
        let mut command = twin.exec_command(0);
        command.args(["sh", "-c", &run]).arg(&interposer).args(["python3", "-c", script]);
        command.args([twin.plain.join("words"), twin.root.join("words"), twin.plain.clone()]);
        let found = output_of(&mut command);
        let owner = me.as_raw() + 1000;
        let expected = format!("{owner} {owner} {owner}\n11 11 some words\n");
        assert_eq!(text(&found.stdout), expected, "{order}: {:?} {}", found.status, text(&found.stderr));
    }
    twin.cluster.down();
}

/// Neither library may pass a call back to the other forever.
#[test]
fn a_preloaded_library_that_makes_system_calls_by_number_works_beside_this_one() {
    if !is_installed("python3") {
        return;
    }
    let (twin, ()) = twin(words_in, |_, _| ());
    let other = twin.cluster.at("by_number.so");
    let source = super::here("by_number.c");
    tool("gcc", &["-shared".as_ref(), "-fPIC".as_ref(), "-o".as_ref(), other.as_os_str(), source.as_os_str()]);
    let script = "import mmap, os, sys\n\
                  for path in sys.argv[1:]:\n\
                  \x20   number = os.open(path, 0)\n\
                  \x20   copy, high = os.dup(number), os.dup2(number, 50)\n\
                  \x20   print(os.fstat(copy).st_size, os.read(high, 4), os.lseek(copy, 0, 1), mmap.mmap(copy, 0, prot=mmap.PROT_READ)[:])\n\
                  \x20   for each in number, copy, high: os.close(each)\n\
                  \x20   big = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS); big.resize(1 << 22); big[-1] = 7\n\
                  os.fchdir(os.open(os.path.dirname(sys.argv[2]), 0)); print(open('words').read(), end='')\n";
    for order in ["$0:$LD_PRELOAD", "$LD_PRELOAD:$0"] {
        let run = format!("LD_PRELOAD={order} exec \"$@\"");
        let mut command = twin.exec_command(0);
        command.args(["sh", "-c", &run]).arg(&other).args(["python3", "-c", script]);
        command.args([twin.plain.join("words"), twin.root.join("words")]);
        let found = output_of(&mut command);
        let line = "11 b'some' 4 b'some words\\n'\n";
        assert_eq!(
            text(&found.stdout),
            format!("{line}{line}some words\n"),
            "{order}: {:?} {}",
            found.status,
            text(&found.stderr)
        );
    }
    twin.cluster.down();
}

/// SEMANTICS: "Node sees what it would see in a plain directory: stat, realpath, require, copyFile, streams, and many reads at a
/// time in its thread pool."
#[test]
fn node_reads_the_namespace_as_a_plain_directory() {
    if !is_installed("node") {
        return;
    }
    let make = |root: &Path| {
        words_in(root);
        fs::create_dir(root.join("folder")).unwrap();
        fs::write(root.join("module.js"), "exports.answer = 42;\n").unwrap();
        fs::write(root.join("folder/index.js"), "exports.name = __filename;\n").unwrap();
        fs::write(root.join("big"), (0..700_001_u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 9) as u8).collect::<Vec<_>>())
            .unwrap();
        std::os::unix::fs::symlink("words", root.join("link")).unwrap();
    };
    let script = super::here("node.js");
    let (twin, expected) = twin(make, |ground, root| {
        let found = plainly(ground, &["node".as_ref(), script.as_os_str(), root.as_os_str()]);
        assert!(found.status.success(), "{}", text(&found.stderr));
        text(&found.stdout)
    });
    let mut command = twin.exec_command(0);
    let found = output_of(command.arg("node").arg(&script).arg(&twin.root));
    assert_eq!(text(&found.stdout), expected, "{}", text(&found.stderr));
    twin.cluster.down();
}
