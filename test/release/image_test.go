package release

import (
	"archive/tar"
	"bytes"
	"debug/elf"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/blockdev"
)

const (
	// maxSize is the maximum size of the files of an image in bytes.
	maxSize = 70_000_000
	// epoch is the time of the image and its files, in seconds since 1970.
	epoch = 1_700_000_000
	name  = "ghcr.io/trivet-csi/trivet:v1.2.3"
)

var libraries = map[string]string{"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu"}

// TestImage assembles the images of both architectures twice, and checks the result.
func TestImage(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-release and make test-all run this test, because it builds the binaries of two architectures, which takes minutes")
	}
	testenv.Require(t, "network") // for the Debian packages, unless they are in the cache
	assembler := buildGo(t, "release", ".")
	amd64, arm64 := buildGo(t, ".", "./cmd/trivet", "GOARCH=amd64"), buildGo(t, ".", "./cmd/trivet", "GOARCH=arm64")
	assemble := func(file string, binaries ...string) []byte {
		args := append([]string{"image", "-out", file, "-name", name, "-version", "v1.2.3", "-revision", "abc", "-epoch", strconv.Itoa(epoch)}, binaries...)
		t.Log(testenv.Run(t, assembler, args...))
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	first := filepath.Join(t.TempDir(), "first.tar")
	if !bytes.Equal(assemble(first, amd64, arm64), assemble(filepath.Join(t.TempDir(), "second.tar"), amd64, arm64)) {
		t.Error("two archives of the same binaries are different, want equal ones")
	}

	a := readArchive(t, first)
	top := a.index(t)
	if len(top) != 1 || top[0].Annotations["org.opencontainers.image.ref.name"] != name {
		t.Fatalf("got %+v in index.json, want one index with the name %s", top, name)
	}
	var index manifest
	a.read(t, top[0], &index)
	images := map[string]*image{}
	for _, d := range index.Manifests {
		images[d.Platform.Architecture] = a.image(t, d)
	}
	if got := slices.Sorted(maps.Keys(images)); !slices.Equal(got, []string{"amd64", "arm64"}) {
		t.Fatalf("got images for %q, want amd64 and arm64", got)
	}
	for arch, i := range images {
		t.Run(arch, func(t *testing.T) { i.check(t, arch) })
	}
	own := images[runtime.GOARCH]
	t.Run("run", func(t *testing.T) { own.run(t) })
	t.Run("rootfs", func(t *testing.T) {
		dir := filepath.Join(t.TempDir(), "rootfs")
		binary := map[string]string{"amd64": amd64, "arm64": arm64}[runtime.GOARCH]
		testenv.Run(t, assembler, "rootfs", "-out", dir, "-epoch", strconv.Itoa(epoch), binary)
		own.checkRootfs(t, dir)
	})
	t.Run("one", func(t *testing.T) {
		file := filepath.Join(t.TempDir(), "one.tar")
		assemble(file, arm64)
		one := readArchive(t, file).index(t)
		if len(one) != 1 || one[0].Platform == nil || one[0].Platform.Architecture != "arm64" || one[0].Digest != index.Manifests[1].Digest {
			t.Errorf("got %+v in index.json, want the image for arm64 as in the index, %+v", one, index.Manifests[1])
		}
	})
}

func (i *image) check(t *testing.T, arch string) {
	t.Logf("%.1f MB", float64(i.size())/1e6)
	if i.size() > maxSize {
		t.Errorf("the files have %d bytes, want at most %d", i.size(), maxSize)
	}
	c := i.config.Config
	if i.config.Architecture != arch || i.config.Created.Unix() != epoch || c.User != "0:0" || c.Labels["org.opencontainers.image.version"] != "v1.2.3" {
		t.Errorf("got the configuration %+v, want %s, the time %d, the user 0:0 and the version v1.2.3", i.config, arch, epoch)
	}
	if !slices.Equal(c.Entrypoint, []string{"/usr/local/bin/trivet"}) || !slices.Equal(c.Cmd, []string{"driver"}) {
		t.Errorf("the image starts %q %q, want /usr/local/bin/trivet driver", c.Entrypoint, c.Cmd)
	}
	for _, layer := range i.layers {
		checkLayer(t, layer)
	}
	var dynamic int
	for at, f := range i.files {
		program, err := elf.NewFile(bytes.NewReader(f.data))
		if err != nil {
			continue // not an ELF file
		}
		if want := map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}[arch]; program.Machine != want {
			t.Errorf("%s is for %s, want %s", at, program.Machine, want)
		}
		dynamic += i.checkLinked(t, at, program, arch)
	}
	if dynamic < len(blockdev.Programs) {
		t.Errorf("got %d dynamically linked files, want at least the %d programs of the driver", dynamic, len(blockdev.Programs))
	}
	i.checkPrograms(t)
	i.checkDocuments(t)
}

// checkLayer checks that nothing in a layer depends on the machine that assembled it.
func checkLayer(t *testing.T, layer []file) {
	var names []string
	for _, f := range layer {
		names = append(names, strings.TrimSuffix(f.Name, "/"))
		if f.Uid != 0 || f.Gid != 0 || f.Uname != "" || f.ModTime.Unix() != epoch {
			t.Errorf("%s belongs to %d:%d (%q) and has the time %d, want 0:0 and %d", f.Name, f.Uid, f.Gid, f.Uname, f.ModTime.Unix(), epoch)
		}
		if f.Mode&0o6000 != 0 || f.Mode&0o022 != 0 && f.Typeflag != tar.TypeSymlink && f.Name != "tmp/" {
			t.Errorf("%s has the mode %o, want no set-user-ID bit and no write permission for others", f.Name, f.Mode)
		}
	}
	if !slices.IsSorted(names) {
		t.Errorf("the layer contains %q, want sorted names", names)
	}
}

// checkLinked checks that the image has the loader and the libraries of a program, and returns 1 if the
// program has any.
func (i *image) checkLinked(t *testing.T, at string, program *elf.File, arch string) int {
	needed, err := program.ImportedLibraries()
	if err != nil {
		t.Errorf("%s: %v", at, err)
	}
	for _, library := range needed {
		if !i.exists(path.Join("/lib", libraries[arch], library)) {
			t.Errorf("%s needs %s, which the image lacks", at, library)
		}
	}
	for _, segment := range program.Progs {
		if segment.Type != elf.PT_INTERP {
			continue
		}
		loader := make([]byte, segment.Filesz)
		if _, err := segment.ReadAt(loader, 0); err != nil {
			t.Errorf("%s: %v", at, err)
		}
		if !i.exists(strings.TrimRight(string(loader), "\x00")) {
			t.Errorf("%s needs the loader %s, which the image lacks", at, loader)
		}
	}
	return min(len(needed), 1)
}

// checkPrograms checks that the programs in PATH are those that the driver starts, and the plugin of kubectl.
func (i *image) checkPrograms(t *testing.T) {
	want := []string{"cryptsetup", "kubectl-trivet", "lvm", "mke2fs", "trivet"} // mkfs.ext4 is a link to mke2fs
	for _, p := range blockdev.Programs {
		want = append(want, p.Name)
	}
	var got []string
	for at, f := range i.files {
		if dir := path.Dir(at); f.Typeflag != tar.TypeDir && (strings.HasSuffix(dir, "/bin") || strings.HasSuffix(dir, "/sbin")) {
			got = append(got, path.Base(at))
		}
	}
	slices.Sort(want)
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("got the programs %q, want %q", got, want)
	}
}

// checkDocuments checks that each package of the image has its copyright file and its entry for scanners.
func (i *image) checkDocuments(t *testing.T) {
	var packages int
	for at, f := range i.files {
		dir, pkg := path.Split(at)
		if dir != "/var/lib/dpkg/status.d/" {
			continue
		}
		packages++
		if !bytes.Contains(f.data, []byte("Package: "+pkg+"\n")) || !bytes.Contains(f.data, []byte("\nVersion: ")) {
			t.Errorf("%s contains %q, want the control file of the package", at, f.data)
		}
		if !i.exists("/usr/share/doc/" + pkg + "/copyright") {
			t.Errorf("the image has no copyright file of %s", pkg)
		}
	}
	if packages == 0 {
		t.Error("the image has no package for scanners")
	}
}

// run starts the programs of the image in a chroot.
func (i *image) run(t *testing.T) {
	testenv.RequireRoot(t)
	dir := t.TempDir()
	i.extract(t, dir)
	for _, mount := range []string{"dev", "proc", "sys"} {
		at := filepath.Join(dir, mount)
		testenv.Run(t, "mount", "--bind", "/"+mount, at)
		t.Cleanup(func() { testenv.Run(t, "umount", at) })
	}
	inside := func(program string, args ...string) ([]byte, error) {
		cmd := exec.Command(program, args...)
		cmd.Env, cmd.Dir, cmd.SysProcAttr = i.config.Config.Env, "/", &syscall.SysProcAttr{Chroot: dir}
		return cmd.CombinedOutput()
	}

	// Without a driver doctor may fail, but it must find the programs.
	out, _ := inside("/usr/local/bin/trivet", "doctor", "-o", "json")
	var checks []struct{ Name, Result, Seen string }
	if err := json.Unmarshal(out, &checks); err != nil {
		t.Fatalf("trivet doctor: %v\n%s", err, out)
	}
	var found []string
	for _, c := range checks {
		if c.Result == "ok" {
			found = append(found, c.Name)
		}
	}
	for _, p := range blockdev.Programs {
		if !slices.Contains(found, "program "+p.Name) {
			t.Errorf("trivet doctor has no check with the result ok for %s:\n%s", p.Name, out)
		}
	}

	if out, err := inside("/usr/sbin/lvm", "version"); err != nil {
		t.Errorf("lvm version: %v\n%s", err, out)
	}
	if out, err := inside("/usr/sbin/cryptsetup", "--version"); err != nil {
		t.Errorf("cryptsetup --version: %v\n%s", err, out)
	}
	for _, command := range []string{"mkfs.ext4 -q -F", "mkfs.xfs -q", "mkfs.btrfs -q", "e2fsck -fn"} {
		words := strings.Fields(command)
		fsType := strings.TrimPrefix(strings.Replace(words[0], "e2fsck", "mkfs.ext4", 1), "mkfs.")
		disk := "/tmp/" + fsType
		if words[0] != "e2fsck" {
			testenv.Run(t, "truncate", "-s", "400M", filepath.Join(dir, disk))
		}
		if out, err := inside("/usr/sbin/"+words[0], append(words[1:], disk)...); err != nil {
			t.Errorf("%s: %v\n%s", command, err, out)
		}
		if got := testenv.Run(t, "blkid", "-p", "-s", "TYPE", "-o", "value", filepath.Join(dir, disk)); got != fsType {
			t.Errorf("%s: got a filesystem of the type %q, want %s", command, got, fsType)
		}
	}
}

// checkRootfs checks that a directory has the same files as the image.
func (i *image) checkRootfs(t *testing.T, dir string) {
	got := map[string]string{}
	err := filepath.WalkDir(dir, func(at string, d os.DirEntry, err error) error {
		if err != nil || at == dir {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		relative, err := filepath.Rel(dir, at)
		if err != nil {
			return err
		}
		link, _ := os.Readlink(at)
		content := ""
		if info.Mode().IsRegular() {
			data, err := os.ReadFile(at)
			if err != nil {
				return err
			}
			content = string(data)
		}
		got["/"+relative] = fmt.Sprint(info.Mode(), link, content)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for at, f := range i.files {
		if want := fmt.Sprint(f.FileInfo().Mode(), f.Linkname, string(f.data)); got[at] != want {
			t.Errorf("%s is %.80q in the directory, want %.80q as in the image", at, got[at], want)
		}
		delete(got, at)
	}
	for at := range got {
		t.Errorf("the directory has %s, which the image lacks", at)
	}
}
