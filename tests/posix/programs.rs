//! Lists the programs of `tests/posix.rs` that read or copy a tree, as shell scripts.

/// Shell scripts that print what they see, each with the program that it needs; `$R` is the tree. They hide what the namespace does
/// not promise: sizes of directories, the order in which a directory is listed, and inode numbers.
pub(crate) const PROGRAMS: &[(&str, &str)] = &[
    (
        "find",
        "find $R -type f -ls | awk '{ $1 = $2 = \"\"; print }' | sort; find $R -printf '%P %y %#m %n %T@ %u %g %l\\n' | sort",
    ),
    (
        "find",
        "find $R/meta -name '*.rs' -newer $R/data/numbers.txt; find $R -links +1 -type f | sort; find -L $R -type l | sort; cd $R && find . -empty | sort",
    ),
    ("find", "find $R/data -type f -exec wc -c {} + | sort; find $R/data -name w* -execdir cat {} \\;"),
    (
        "ls",
        "ls -lR $R | grep -v ^total | sed -E 's/ +/ /g; s/^(d[^ ]* [0-9]+ [^ ]+ [^ ]+) [0-9]+/\\1/'; ls -d $R/data/../m*; ls $R/nothing-there",
    ),
    ("sha256sum", "find $R -type f | sort | xargs sha256sum"),
    ("md5sum", "find $R -type f | sort | xargs md5sum > sums && md5sum -c sums | grep -vc OK; cd $R/data && md5sum < big.bin"),
    ("grep", "grep -rn 'pub fn' $R | sort; grep -c 1 $R/data/numbers.txt; grep -l words -r $R/data; grep x $R/data"),
    ("du", "cd $R/data && du -b *; du -b --apparent-size $R/data/big.bin"),
    ("wc", "wc $R/data/*; cat $R/data/numbers.txt | wc -l; wc -l < $R/data/numbers.txt"),
    ("file", "cd $R && file -b data/* link out empty"),
    (
        "head",
        "head -c 100 $R/data/numbers.txt; tail -n 3 $R/data/numbers.txt; tail -c 7 < $R/data/numbers.txt; head -n 2 $R/data/*.txt",
    ),
    ("xargs", "find $R -type f -print0 | sort -z | xargs -0 -P4 -n 20 cksum | sort"),
    ("git", "git hash-object $R/data/* ; git diff --no-index --stat $R/meta/src $R/client/src; true"),
    (
        "gcc",
        "printf '#include <answer.h>\\n#include \"../data/answer.h\"\\nANSWER' | gcc -E -P -I $R/data -iquote $R/data -; gcc -E -M -I $R/data -include answer.h -x c /dev/null",
    ),
    (
        "sqlite3",
        "sqlite3 -readonly $R/data/table.db 'select count(*), sum(n), max(w) from t'; sqlite3 \"file:$R/data/table.db?mode=ro&immutable=1\" 'select * from t limit 3'",
    ),
    ("dd", "dd if=$R/data/big.bin bs=4096 skip=3 count=5 status=none | cksum; dd if=$R/data/big.bin bs=1M status=none | cksum"),
    ("cmp", "cmp $R/data/numbers.txt $R/link && cmp $R/data/big.bin $R/data/words.txt"),
    ("stat", "stat -c '%n %s %f %h %Y %F' $R/data/* $R/link $R/out; stat -L -c '%s %F' $R/link; stat -f -c %l $R"),
    (
        "readlink",
        "readlink $R/link $R/out; readlink -f $R/link $R/data/../meta $R/nothing; realpath $R/link; realpath --relative-to=$R $R/data/words.txt",
    ),
    (
        "sort",
        "sort -r $R/data/numbers.txt | cksum; sort -m $R/data/words.txt $R/data/words.txt; tac $R/data/words.txt; nl $R/data/words.txt; split -l 5000 $R/data/numbers.txt part- && cat part-* | cksum; rm part-*",
    ),
    (
        "awk",
        "awk '{ s += $1 } END { print s, NR }' $R/data/numbers.txt; sed -n '10,12p' $R/data/numbers.txt; cut -c1 $R/data/words.txt; od -c $R/data/words.txt; od -t x1 -j 2999990 $R/data/big.bin",
    ),
    ("gzip", "gzip -c $R/data/numbers.txt | gunzip | cksum; zcat -f $R/data/words.txt; xz -c $R/data/words.txt | xz -dc"),
    (
        "perl",
        "perl -ne 'print if $. == 7' $R/data/numbers.txt; perl -e 'print -s \"$ARGV[0]/data/big.bin\", \" \", join(\",\", sort glob(\"$ARGV[0]/data/*.txt\")), \"\\n\"' $R",
    ),
    (
        "bash",
        "bash -c 'cd $R/data && pwd && ls && cat < words.txt && echo *.txt && cd .. && pwd -P && [[ -f link && -L link && -d data && -r data/words.txt ]]; echo $?'",
    ),
    (
        "bash",
        "bash -c 'while read -r a; do read -r b; echo $b; done < $R/data/words.txt; mapfile -t l < $R/data/words.txt; echo ${l[1]}; exec 5< $R/data/numbers.txt; read -u 5 x; cat <&5 | cksum; source /dev/stdin < <(echo echo sourced)'",
    ),
    (
        "bash",
        "bash -c '{ head -n 3; echo --; sed -n 1p; } < $R/data/numbers.txt; (cd $R && tar cf - data) | tar tf - | sort; for f in $R/data/w*; do echo ${f##*/}; done; diff <(cat $R/link) $R/data/numbers.txt && echo same'",
    ),
    (
        "sh",
        "$R/data/hello.sh you; cd $R/data && ./hello.sh me; sh hello.sh them; . $R/data/hello.sh; cd ../meta && pwd; cd /; test -x $R/data/hello.sh -a ! -x $R/data/words.txt && echo executable",
    ),
    ("dash", "dash -c 'cd $R/data; cat words.txt; cd ..; ls data | wc -l; exec < link; read x; echo $x; cat | cksum'"),
    (
        "env",
        "cd $R/data && env cat words.txt; nice cat words.txt; timeout 100 cat $R/data/words.txt; nohup cat $R/data/words.txt; setsid -w cat words.txt; xargs cat <<< words.txt",
    ),
    (
        "make",
        "printf 'all: '$R'/data/words.txt\\n\\t@cat $<; wc -c < $<\\n' > Makefile.test; make -s -f Makefile.test; cd $R/data && make -s -f ../../Makefile.test",
    ),
    ("python3", "python3 $PROGRAMS walk $R"),
    ("python3", "python3 $PROGRAMS paths $R"),
    ("python3", "python3 $PROGRAMS copytree $R"),
    ("python3", "python3 $PROGRAMS archives $R"),
    ("python3", "python3 $PROGRAMS mapped $R"),
    ("python3", "python3 $PROGRAMS children $R"),
    ("python3", "python3 $PROGRAMS pools $R"),
    ("python3 -c 'import numpy'", "python3 $PROGRAMS arrays $R"),
    ("python3 -c 'import PIL'", "python3 $PROGRAMS images $R"),
];

/// Shell scripts that copy the tree to `$O`, each with the program that it needs.
pub(crate) const COPIERS: &[(&str, &str)] = &[
    ("cp", "cp -a $R $O"),
    ("tar", "mkdir $O && tar --format=posix -C $R -cf - . | tar -C $O -xpf -"),
    ("tar", "mkdir $O && cd $R && tar --format=posix -cf - . | (cd $O && tar -xpf -)"),
    ("rsync", "rsync -aH $R/ $O/"),
    ("bsdtar", "mkdir $O && bsdtar --format=posix -C $R -cf - . | bsdtar -C $O -xpf -"),
    (
        "sh",
        "mkdir $O && cd $R && find . -type d -exec mkdir -p $O/{} \\; && find . -type f -exec cp -p --reflink=auto {} $O/{} \\; && find . -type l -exec cp -Pp {} $O/{} \\; && ln -f $O/data/words.txt $O/same-words && find . -depth -type d -exec touch -r {} $O/{} \\;",
    ),
];
