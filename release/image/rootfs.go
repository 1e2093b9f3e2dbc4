// Package image assembles the container image of the driver from a binary and files of Debian packages. It
// runs no program of these packages, so it works for every architecture on any machine. The same inputs give
// the same image, bit by bit.
package image

import (
	"bytes"
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"path"
	"regexp"
	"strings"
)

// rootfs is the content of an image.
type rootfs struct {
	arch architecture
	// base contains the programs of Debian, and driver the binary. They are separate layers, because base
	// changes only with packages.lock.
	base, driver tree
}

// binaryPath is the path of the driver in the image. pluginPath is a link to it: by this name, the program is the plugin of
// kubectl, which makes the copies of protected claims.
const (
	binaryPath = "/usr/local/bin/trivet"
	pluginPath = "/usr/local/bin/kubectl-trivet"
)

// build assembles the content of the image for the architecture of a static binary.
func build(ctx context.Context, binary []byte) (*rootfs, error) {
	arch, err := architectureOf(binary)
	if err != nil {
		return nil, err
	}
	base, err := baseTree(ctx, arch)
	if err != nil {
		return nil, fmt.Errorf("assembling the image for %s: %w", arch.name, err)
	}
	driver := tree{binaryPath: {mode: 0o755, data: binary}, pluginPath: {link: "trivet"}}
	driver.addParents()
	return &rootfs{arch: arch, base: base, driver: driver}, nil
}

// architectureOf returns the architecture of a static ELF binary.
func architectureOf(binary []byte) (architecture, error) {
	f, err := elf.NewFile(bytes.NewReader(binary))
	if err != nil {
		return architecture{}, err
	}
	if libraries, err := f.ImportedLibraries(); err != nil || len(libraries) > 0 {
		return architecture{}, errors.Join(err, fmt.Errorf("the binary of the driver is not static, it needs %q: build it with CGO_ENABLED=0", libraries))
	}
	switch f.Machine { //nolint:exhaustive // architectures lists those with an image
	case elf.EM_X86_64:
		return architectures["amd64"], nil
	case elf.EM_AARCH64:
		return architectures["arm64"], nil
	}
	return architecture{}, fmt.Errorf("there is no image for %s", f.Machine)
}

// baseTree returns the programs with everything that they need.
func baseTree(ctx context.Context, arch architecture) (tree, error) {
	l, err := parseLock(lockFile)
	if err != nil {
		return nil, err
	}
	all, controls := tree{}, map[string][]byte{}
	for _, p := range l.packages {
		if p.Arch != arch.name {
			continue
		}
		deb, err := l.fetch(ctx, p)
		if err != nil {
			return nil, err
		}
		if controls[p.Name], err = control(deb); err != nil {
			return nil, fmt.Errorf("package %s: %w", p.Name, err)
		}
		if err := all.unpack(deb, p.Name); err != nil {
			return nil, fmt.Errorf("package %s: %w", p.Name, err)
		}
	}
	base := systemTree()
	if err := all.copyPrograms(base, arch); err != nil {
		return nil, err
	}
	if err := all.copyDocuments(base, controls); err != nil {
		return nil, err
	}
	base.addParents()
	return base, nil
}

// systemTree returns the directories and files that container runtimes and the C library expect.
func systemTree() tree {
	t := tree{
		"/etc/passwd": {mode: 0o644, data: []byte("root:x:0:0:root:/root:/sbin/nologin\nnobody:x:65534:65534:nobody:/nonexistent:/sbin/nologin\n")},
		"/etc/group":  {mode: 0o644, data: []byte("root:x:0:\nnogroup:x:65534:\n")},
		"/root":       {dir: true, mode: 0o700},
		"/tmp":        {dir: true, mode: 0o1777},
		// Container runtimes mount these directories.
		"/dev": {dir: true, mode: 0o755}, "/proc": {dir: true, mode: 0o755}, "/sys": {dir: true, mode: 0o755},
		"/run":     {dir: true, mode: 0o755},
		"/var/lib": {dir: true, mode: 0o755},
		"/var/run": {link: "/run"},
	}
	for _, alias := range aliases {
		t[alias] = &entry{link: "usr" + alias}
		t["/usr"+alias] = &entry{dir: true, mode: 0o755}
	}
	return t
}

// copyPrograms copies the programs and the libraries that they are linked with.
func (t tree) copyPrograms(to tree, arch architecture) error {
	queue := append([]string{}, programs...)
	for len(queue) > 0 {
		name := queue[0]
		queue = queue[1:]
		if to[name] != nil {
			continue
		}
		file, err := t.copyPath(to, name)
		if err != nil {
			return err
		}
		needed, err := t.needed(file.data, arch)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		queue = append(queue, needed...)
	}
	return nil
}

// needed returns the paths of the loader and the libraries that an ELF file names.
func (t tree) needed(data []byte, arch architecture) ([]string, error) {
	f, err := elf.NewFile(bytes.NewReader(data))
	if err != nil {
		return nil, err
	}
	var paths []string
	for _, segment := range f.Progs {
		if segment.Type != elf.PT_INTERP {
			continue
		}
		loader, err := io.ReadAll(segment.Open())
		if err != nil {
			return nil, err
		}
		paths = append(paths, merged(string(bytes.TrimRight(loader, "\x00"))))
	}
	libraries, err := f.ImportedLibraries()
	if err != nil {
		return nil, err
	}
	for _, library := range libraries {
		at, err := t.library(library, arch)
		if err != nil {
			return nil, err
		}
		paths = append(paths, at)
	}
	return paths, nil
}

// library returns the path of a library in the directories that the loader of Debian searches (ld.so(8)).
func (t tree) library(name string, arch architecture) (string, error) {
	for _, dir := range []string{"/usr/lib/" + arch.triplet, "/usr/lib"} {
		if at := path.Join(dir, name); t[at] != nil {
			return at, nil
		}
	}
	return "", fmt.Errorf("no package of %s contains the library %s: add its package to release/image/lock.sh, and run make image-lock", arch.name, name)
}

// license matches a license text that copyright files refer to.
var license = regexp.MustCompile(`/usr/share/common-licenses/[A-Za-z0-9.-]*[A-Za-z0-9]`)

// copyDocuments copies what scanners and licenses need: the release of Debian, and for each package with a file
// in the image its copyright file, the license texts that it refers to, and its control file.
func (t tree) copyDocuments(to tree, controls map[string][]byte) error {
	if _, err := t.copyPath(to, "/etc/os-release"); err != nil {
		return err
	}
	packages := map[string]bool{}
	for _, e := range to {
		packages[e.pkg] = e.pkg != ""
	}
	for name, used := range packages {
		if !used {
			continue
		}
		copyright, err := t.copyPath(to, "/usr/share/doc/"+name+"/copyright")
		if err != nil {
			return err
		}
		for _, text := range license.FindAllString(string(copyright.data), -1) {
			if _, err := t.copyPath(to, text); err != nil {
				return err
			}
		}
		// Scanners find packages of images without dpkg here.
		to["/var/lib/dpkg/status.d/"+name] = &entry{mode: 0o644, data: []byte(strings.TrimSpace(string(controls[name])) + "\n")}
	}
	return nil
}
