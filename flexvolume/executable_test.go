package flexvolume_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/trivet-csi/trivet/flexvolume"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/pool"
)

// testInit: what a kubelet asks first, and what it does itself.
func testInit(t *testing.T, binary string) {
	k := newKubelet(t, binary, t.TempDir())
	for driver, onServer := range map[string]bool{"trivet": false, "loop": false, "local": false, "nfs": true} {
		c := k.succeed(driver, "init").Capabilities
		if c == nil || c.Attach || c.SupportsMetrics || c.FSGroup == onServer || c.RequiresFSResize == onServer {
			t.Errorf("%s: %+v", driver, c)
		}
	}
	for _, call := range []string{"attach", "getvolumename", "waitforattach", "isattached", "mountdevice", "unmountdevice", "detach", "dance"} {
		if a := k.call("loop", call, "{}"); a != (flexvolume.Answer{Status: flexvolume.NotSupported}) {
			t.Errorf("%s: %+v", call, a)
		}
	}
	k.refuse("no call is named", "loop")
	k.refuse("mount has 1 arguments: want 2", "loop", "mount", "/x")
}

// testLife: a volume that is made at its first use, for several pods; it is taken off
// the machine with the last, and is there again with what was written.
func testLife(t *testing.T, binary string) {
	for _, tc := range []struct {
		driver, backend, filesystem, fsType string
	}{
		{"loop", "", "xfs", "xfs"},
		{"trivet", "loop", "ext4", "btrfs"},
		{"local", "", "btrfs with simple quotas", ""},
		{"trivet", "local", "btrfs with simple quotas", ""},
	} {
		t.Run(tc.driver+" "+tc.backend+" on "+tc.filesystem, func(t *testing.T) {
			var fs string
			if tc.fsType == "" {
				fs = testenv.SimpleQuotas(t, "2G")
			} else {
				fs = testenv.Filesystem(t, tc.filesystem, "2G")
			}
			k := newKubelet(t, binary, fs)
			own := []string{"kubernetes.io/fsType", tc.fsType, "size", "320Mi"}
			if tc.backend != "" {
				own = append(own, "backend", tc.backend)
			}
			k.life(tc.driver, func(extra ...string) string { return options(append(own, extra...)...) })
		})
	}
}

func (k *kubelet) life(driver string, of func(extra ...string) string) {
	web, db, reader := k.target("web"), k.target("db"), k.target("reader")
	k.refuse("give option size", driver, "mount", web, strings.Replace(of(), `,"size":"320Mi"`, "", 1))
	k.succeed(driver, "mount", web, of())
	k.succeed(driver, "mount", db, of())
	k.succeed(driver, "mount", reader, of("kubernetes.io/readwrite", "ro"))
	k.succeed(driver, "mount", db, of()) // it is there
	k.write(filepath.Join(web, "file"), "kept")
	k.read(filepath.Join(db, "file"), "kept")
	if err := os.WriteFile(filepath.Join(reader, "file"), nil, 0o600); !errors.Is(err, syscall.EROFS) {
		k.t.Errorf("writing read-only: %v", err)
	}

	before := size(k.t, web)
	if a := k.succeed(driver, "expandvolume", of(), "", fmt.Sprint(640<<20), fmt.Sprint(320<<20)); a.NewSize != 640<<20 {
		k.t.Errorf("%+v", a)
	}
	k.succeed(driver, "expandfs", of(), "", "", fmt.Sprint(640<<20), fmt.Sprint(320<<20))
	if !strings.Contains(of(), `fsType":""`) { // a directory has the size of its pool
		if after := size(k.t, web); after < before*3/2 {
			k.t.Errorf("it had %d bytes, and has %d", before, after)
		}
	}

	k.succeed(driver, "unmount", web)
	k.read(filepath.Join(db, "file"), "kept")
	k.succeed(driver, "unmount", reader)
	k.succeed(driver, "unmount", db)
	k.succeed(driver, "unmount", db) // it is gone
	k.checkNothingLeft()

	web = k.target("web")
	k.succeed(driver, "mount", web, of())
	k.read(filepath.Join(web, "file"), "kept")
	k.succeed(driver, "unmount", web)
}

// testAnother: a directory has one volume at a time, and what a killed call has left of
// the one before goes.
func testAnother(t *testing.T, binary string) {
	k := newKubelet(t, binary, testenv.Filesystem(t, "xfs", "2G"))
	at := k.target("web")
	of := func(volume string) string { return options("size", "32Mi", "volume", volume) }
	k.succeed("loop", "mount", at, of("one"))
	k.refuse("unmount it there first", "loop", "mount", at, of("two"))
	must(t, syscall.Unmount(at, 0)) // as if the call had been killed before
	k.succeed("loop", "mount", at, of("two"))
	k.succeed("loop", "unmount", at)
}

// testTogether: calls that come at once wait for each other, and each is done.
func testTogether(t *testing.T, binary string) {
	k := newKubelet(t, binary, testenv.Filesystem(t, "xfs", "2G"))
	const pods = 8
	var targets []string
	for i := range pods {
		targets = append(targets, k.target(fmt.Sprint("pod", i)))
	}
	of := func(i int) string { return options("size", "32Mi", "volume", fmt.Sprint("v", i%3)) }
	together(pods, func(i int) { k.succeed("loop", "mount", targets[i], of(i)) })
	for i, at := range targets {
		k.write(filepath.Join(at, fmt.Sprint(i)), "x")
	}
	together(pods, func(i int) {
		k.succeed("loop", "unmount", targets[i])
	})
}

// testBadInput: what is wrong is named, and nothing is left of it.
func testBadInput(t *testing.T, binary string) {
	k := newKubelet(t, binary, testenv.Filesystem(t, "xfs", "1G"))
	full := k.target("full")
	k.write(filepath.Join(full, "file"), "somebody's")
	for _, tc := range []struct {
		driver, says string
		words        []string
	}{
		{"loop", "want a JSON object", []string{"mount", k.target("a"), "{"}},
		{"loop", "want a JSON object", []string{"mount", k.target("a"), `{"size": 1}`}},
		{"loop", `parameter siez="1Gi" is unknown`, []string{"mount", k.target("a"), options("siez", "1Gi")}},
		{"loop", `option size="big"`, []string{"mount", k.target("a"), options("size", "big")}},
		{"loop", `option pool="other"`, []string{"mount", k.target("a"), options("pool", "other")}},
		{"loop", `option backend="nfs"`, []string{"mount", k.target("a"), options("backend", "nfs")}},
		{"loop", `option server="nas"`, []string{"mount", k.target("a"), options("server", "nas", "share", "/e")}},
		{"loop", `fstype="ntfs"`, []string{"mount", k.target("a"), options("size", "32Mi", "kubernetes.io/fsType", "ntfs")}},
		{"loop", `mount_flags`, []string{"mount", k.target("a"), options("size", "32Mi", "mountOptions", "bind")}},
		{"loop", "is not empty", []string{"mount", full, options("size", "32Mi")}},
		{"loop", "want an absolute path", []string{"mount", "relative", options("size", "32Mi")}},
		{"nfs", `options server="", share="/e"`, []string{"mount", k.target("a"), options("share", "/e")}},
		{"nfs", `option pool="flex": a directory of a server takes only`, []string{"mount", k.target("a"), options("server", "nas", "share", "/e", "pool", "flex")}},
		{"nfs", `server="nas/x"`, []string{"mount", k.target("a"), options("server", "nas/x", "share", "/e")}},
		{"nfs", `server="nas/x"`, []string{"mount", k.target("a"), options("server", "nas/x", "export", "/e")}},
		{"local", `size "0x10"`, []string{"expandvolume", options(), "", "0x10", "1"}},
		{"loop", "left alone", []string{"unmount", full}},
	} {
		k.refuse(tc.says, tc.driver, tc.words...)
	}
	k.read(filepath.Join(full, "file"), "somebody's")
	other := k.target("other")
	testenv.Run(t, "mount", "-t", "tmpfs", "tmpfs", other)
	t.Cleanup(func() { testenv.Run(t, "umount", other) })
	k.refuse("other than this volume", "loop", "unmount", other)
}

// testForeignDriver: a pool that is in use by a driver other than the configured one cannot
// be used, and the error says so; a mounted volume can be unmounted.
func testForeignDriver(t *testing.T, binary string) {
	k := newKubelet(t, binary, testenv.Filesystem(t, "xfs", "1G"))
	web := k.target("web")
	k.succeed("loop", "mount", web, options("size", "32Mi"))
	k.awaitIdle()
	state, err := os.OpenRoot(t.TempDir())
	must(t, err)
	defer state.Close()
	p, err := pool.Open(t.Context(), nil, pool.Config{Name: "flex", Directory: pool.Directory{Path: k.pool}}, state, nil)
	must(t, err)
	defer p.Close()
	k.refuse("is in use by another driver", "loop", "mount", k.target("db"), options())
	k.succeed("loop", "unmount", web)
}
