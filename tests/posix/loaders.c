/* Loads libraries from a tree and prints what the dynamic linker returns. Arguments: the tree, and a library outside of it. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static char path[4096];
static const char *root;

static const char *at(const char *name) {
    snprintf(path, sizeof path, "%s/%s", root, name);
    return path;
}

static void *load(const char *name, int flags) {
    errno = 77;
    void *handle = dlopen(name, flags);
    printf("dlopen %s: %s\n", name, handle ? "loaded" : dlerror());
    return handle;
}

static int call(void *handle, const char *name) {
    int (*function)(void) = handle ? (int (*)(void))dlsym(handle, name) : NULL;
    return function ? function() : -1;
}

int main(int count, char **arguments) {
    root = arguments[1];
    load(at("missing.so"), RTLD_NOW);
    load(at("not-a-library"), RTLD_NOW);
    load(at("one.so/below"), RTLD_NOW);
    printf("before: %d\n", dlopen(at("one.so"), RTLD_LAZY | RTLD_NOLOAD) != NULL);

    void *one = load(at("one.so"), RTLD_NOW);
    printf("counts %d %d\n", call(one, "count_one"), call(one, "count_one"));
    void *again = dlopen(at("sub/../link.so"), RTLD_LAZY);
    printf("the same %d, counts %d\n", again == one, call(again, "count_one"));
    printf("after: %d\n", dlopen(at("one.so"), RTLD_LAZY | RTLD_NOLOAD) == one);
    printf("chdir %d\n", chdir(root));
    printf("relative: %d\n", dlopen("./one.so", RTLD_NOW) == one);
    chdir("/");

    Dl_info info;
    int found = dladdr(dlsym(one, "count_one"), &info);
    printf("dladdr %d %s\n", found != 0, info.dli_fname);
    struct link_map *map;
    found = dladdr1(dlsym(one, "count_one"), &info, (void **)&map, RTLD_DL_LINKMAP);
    printf("dladdr1 %d %s\n", found != 0, info.dli_fname);
    dladdr(main, &info);
    printf("main is %s\n", strrchr(info.dli_fname, '/'));

    /* Needs libtwo.so, which needs libthree.so, in folders relative to their own. */
    void *user = load(at("sub/user.so"), RTLD_NOW | RTLD_LOCAL);
    printf("of the needed ones %d, local %d\n", call(user, "sum"), dlsym(RTLD_DEFAULT, "two") != NULL);
    user = load(at("sub/user.so"), RTLD_NOW | RTLD_GLOBAL);
    printf("global %d\n", dlsym(RTLD_DEFAULT, "two") != NULL);

    for (int left = 4; left > 0; left--)
        printf("dlclose %d\n", dlclose(one));
    void *group = dlmopen(LM_ID_NEWLM, at("alone.so"), RTLD_NOW);
    printf("dlmopen %d %d\n", group != NULL, call(group, "alone"));

    /* A library outside the tree names a folder. The linker looks there for a library that it loads by a plain name. */
    void *outside = count > 2 ? dlopen(arguments[2], RTLD_NOW) : NULL;
    printf("from outside %d\n", call(outside, "load_neighbor"));
    printf("an own handle %d\n", dlopen(NULL, RTLD_NOW) != NULL);
    load("no-such-library.so", RTLD_NOW);
    printf("no more errors %d\n", dlerror() == NULL);
    return 0;
}
