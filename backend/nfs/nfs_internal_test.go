package nfs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

func ptr(n uint32) *uint32 { return &n }

// TestCapabilities: a capability that a directory of an export cannot have is refused.
func TestCapabilities(t *testing.T) {
	for _, tc := range []struct {
		name string
		c    volume.Capability
		says string // text in the error; empty if the capability is supported
	}{
		{"many nodes", volume.Capability{Mode: volume.MultiNodeMultiWriter}, ""},
		{"one pod", volume.Capability{Mode: volume.SingleNodeSingleWriter, FSType: "nfs"}, ""},
		{"flags", volume.Capability{Mode: volume.SingleNodeWriter, MountFlags: []string{"nfsvers=4.1,hard", "noatime"}}, ""},
		{"many readers", volume.Capability{Mode: volume.MultiNodeReaderOnly}, ""},
		{"one writer of many nodes", volume.Capability{Mode: volume.MultiNodeSingleWriter}, "MULTI_NODE_MULTI_WRITER"},
		{"device", volume.Capability{Mode: volume.SingleNodeWriter, Block: true}, "raw device"},
		{"filesystem", volume.Capability{Mode: volume.SingleNodeWriter, FSType: "ext4"}, `"ext4"`},
		{"remount", volume.Capability{Mode: volume.SingleNodeWriter, MountFlags: []string{"remount"}}, "remount"},
		{"another server", volume.Capability{Mode: volume.SingleNodeWriter, MountFlags: []string{"addr=192.0.2.1"}}, "addr"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			err := backend.Kinds{Kind}.CheckCapabilities(volume.Spec{Parameters: volume.Parameters{Backend: Name}, Capabilities: []volume.Capability{tc.c}})
			if (err == nil) != (tc.says == "") || err != nil && (!errors.Is(err, volume.ErrInvalid) || !strings.Contains(err.Error(), tc.says)) {
				t.Errorf("got %v, want %q in the error", err, tc.says)
			}
		})
	}
}

// TestStaticVolume: the attributes of a static PersistentVolume specify the server and the path that are
// mounted. Invalid attributes are refused.
func TestStaticVolume(t *testing.T) {
	b := New(pool.NewSet(nil, nil, nil)).(*Backend)
	for _, tc := range []struct {
		name    string
		context map[string]string
		path    string // path of the mount; empty if it is not a static volume
		err     error
	}{
		{"whole share", map[string]string{"server": "nas", "share": "/tank/"}, "/tank", nil},
		{"share as export", map[string]string{"server": "nas", "Export": "/tank/"}, "/tank", nil},
		{"share and export", map[string]string{"server": "nas", "share": "/tank", "export": "/other"}, "", volume.ErrInvalid},
		{"directory", map[string]string{"server": "nas", "share": "/tank", "subDir": "team/a"}, "/tank/team/a", nil},
		{"keys of csi-driver-nfs", map[string]string{"server": "nas", "share": "/", "subdir": "pvc-1", "csi.storage.k8s.io/pv/name": "pvc-1"}, "/pvc-1", nil},
		{"keys in other cases", map[string]string{"Server": "nas", "SHARE": "/tank", "SubDir": "/a/"}, "/tank/a", nil},
		{"inside the folders of a pool", map[string]string{"server": "nas", "share": "/tank", "subDir": "volumes/x/data"}, "/tank/volumes/x/data", nil},
		{"other attributes", map[string]string{"foo": "bar"}, "", nil},
		{"no attributes", nil, "", nil},
		{"server alone", map[string]string{"server": "nas"}, "", volume.ErrInvalid},
		{"share alone", map[string]string{"share": "/tank"}, "", volume.ErrInvalid},
		{"parent directory in subDir", map[string]string{"server": "nas", "share": "/tank", "subDir": "a/../../b"}, "", volume.ErrInvalid},
		{"parent directory in share", map[string]string{"server": "nas", "share": "/tank/.."}, "", volume.ErrInvalid},
		{"newline", map[string]string{"server": "nas", "share": "/tank", "subDir": "a\nb"}, "", volume.ErrInvalid},
		{"path in server", map[string]string{"server": "nas:/x", "share": "/tank"}, "", volume.ErrInvalid},
	} {
		t.Run(tc.name, func(t *testing.T) {
			v, ok, err := b.StaticVolume("some-handle#1", tc.context)
			if !errors.Is(err, tc.err) || ok != (tc.path != "") {
				t.Fatalf("got %+v, %t, %v; want path %q and error %v", v, ok, err, tc.path, tc.err)
			}
			if !ok {
				return
			}
			attached, err := b.Attach(t.Context(), v, volume.Secrets{})
			if err != nil {
				t.Fatal(err)
			}
			if source := attached.(*mount.NFSSource); source.Server != "nas" || source.Path != tc.path || source.AnyPath || source.Verify != nil {
				t.Errorf("Attach: got %+v, want path %q on server nas", source, tc.path)
			}
			present, ok, err := b.Present(t.Context(), v)
			if !ok || err != nil {
				t.Fatalf("Present: got %t, %v; want true", ok, err)
			}
			if mounts, err := mount.Of(present); len(mounts) > 0 || err != nil {
				t.Errorf("before the volume is mounted: got mounts %v, %v; want none", mounts, err)
			}
			if err := Kind.Supports(v, volume.Capability{Mode: volume.MultiNodeMultiWriter}); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestSource: the source of a volume is known even if its pool is not open.
func TestSource(t *testing.T) {
	c := pool.Config{Name: "nas", NFS: &pool.NFS{Server: "[FD00::1]", Export: "/tank/", MountOptions: []string{"hard"}}}
	b := New(pool.NewSharedSet(nil, c, nil, pool.Shared{}))
	directory := &volume.Directory{OnDelete: volume.OnDeleteDelete}
	nested := &volume.Directory{SubDir: "team/a", OnDelete: volume.OnDeleteDelete}
	for _, tc := range []struct {
		name string
		v    volume.Volume
		want string // source in the mount table; empty if the error is ErrUnavailable
	}{
		{"own folder", volume.Volume{Version: 1, ID: volume.ID{Backend: Name, Pool: "nas", Name: "v"}, Directory: directory}, "[fd00::1]:/tank/volumes/v/data"},
		{"subDir", volume.Volume{Version: 1, ID: volume.ID{Backend: Name, Pool: "nas", Name: "v"}, Directory: nested}, "[fd00::1]:/tank/team/a"},
		{"the ID alone", volume.Volume{ID: volume.ID{Backend: Name, Pool: "nas", Name: "v"}}, "[fd00::1]:/tank"},
		{"direct", volume.Volume{Version: 1, ID: volume.ID{Backend: Name, Pool: "=nas=/t", Name: "v"}, Directory: directory}, "nas:/t/volumes/v/data"},
		{"unknown pool", volume.Volume{Version: 1, ID: volume.ID{Backend: Name, Pool: "gone", Name: "v"}, Directory: directory}, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			present, ok, err := b.Present(t.Context(), tc.v)
			if tc.want == "" {
				if !errors.Is(err, volume.ErrUnavailable) {
					t.Errorf("got %+v, %v; want ErrUnavailable", present, err)
				}
				return
			}
			if err != nil || !ok {
				t.Fatalf("Present: got %t, %v; want true", ok, err)
			}
			if source := present.(*mount.NFSSource); source.String() != tc.want || source.AnyPath != (tc.v.Directory == nil) {
				t.Errorf("got %+v, want %s", source, tc.want)
			}
			matches, err := present.Matcher(nil)
			if err != nil || matches(&mount.Entry{FSType: "nfs4", Source: tc.want + "x"}) {
				t.Errorf("the source matches a mount of another directory: %v", err)
			}
		})
	}
	onNode := New(pool.NewSet(nil, []pool.Config{{Name: "local", Directory: pool.Directory{Path: "/x"}}}, nil))
	_, _, err := onNode.Present(t.Context(), volume.Volume{Version: 1, ID: volume.ID{Backend: Name, Pool: "local", Name: "v"}, Directory: directory})
	if !errors.Is(err, volume.ErrUnavailable) {
		t.Errorf("in a pool of a node: got %v, want ErrUnavailable", err)
	}
}

// TestPrepare: a new directory has the requested mode and owner, or the defaults. An adopted directory keeps a
// mode and owner that the request does not specify. The record contains the result.
func TestPrepare(t *testing.T) {
	testenv.RequireRoot(t)
	for _, tc := range []struct {
		name      string
		empty     bool
		requested volume.DirectoryParameters
		want      volume.Directory
	}{
		{"created", true, volume.DirectoryParameters{}, volume.Directory{Mode: 0o777}},
		{"created with mode and owner", true, volume.DirectoryParameters{Mode: ptr(0o2750), UID: ptr(1000), GID: ptr(2000)}, volume.Directory{Mode: 0o2750, UID: 1000, GID: 2000}},
		{"mode 0", true, volume.DirectoryParameters{Mode: ptr(0)}, volume.Directory{}},
		{"adopted", false, volume.DirectoryParameters{}, volume.Directory{Mode: 0o1711, UID: 7, GID: 8}},
		{"adopted, another mode", false, volume.DirectoryParameters{Mode: ptr(0o700)}, volume.Directory{Mode: 0o700, UID: 7, GID: 8}},
		{"adopted, another group", false, volume.DirectoryParameters{GID: ptr(9)}, volume.Directory{Mode: 0o1711, UID: 7, GID: 9}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "data")
			must(t, os.Mkdir(path, 0o700))
			if !tc.empty {
				must(t, os.Chown(path, 7, 8))
				must(t, syscall.Chmod(path, 0o1711))
			}
			dir, err := os.Open(path)
			must(t, err)
			defer dir.Close()
			var got volume.Directory
			must(t, prepare(dir, tc.empty, tc.requested, &got))
			st, err := stat(dir)
			must(t, err)
			if now := (volume.Directory{Mode: volume.Mode(st.Mode & 0o7777), UID: st.Uid, GID: st.Gid}); got != tc.want || now != tc.want {
				t.Errorf("got record %+v and directory %+v, want %+v", got, now, tc.want)
			}
		})
	}
}

// TestCheckApplied: a server that sets other values than the requested ones is refused.
func TestCheckApplied(t *testing.T) {
	have := volume.Directory{Mode: 0o755, UID: 99, GID: 100}
	for _, tc := range []struct {
		requested volume.DirectoryParameters
		says      string // text in the error; empty if the directory is accepted
	}{
		{volume.DirectoryParameters{}, ""},
		{volume.DirectoryParameters{Mode: ptr(0o755), UID: ptr(99), GID: ptr(100)}, ""},
		{volume.DirectoryParameters{Mode: ptr(0o2770)}, "mode=2770: the server gave the directory 0755"},
		{volume.DirectoryParameters{UID: ptr(0)}, "uid=0: the server gave the directory 99"},
		{volume.DirectoryParameters{GID: ptr(7)}, "gid=7: the server gave the directory 100"},
	} {
		err := checkApplied(tc.requested, &have)
		if (err == nil) != (tc.says == "") || err != nil && (!errors.Is(err, volume.ErrPrecondition) || !strings.Contains(err.Error(), tc.says)) {
			t.Errorf("got %v, want %q in the error", err, tc.says)
		}
	}
}

// TestCheckSquash: a server that maps root but not the other users is refused. The check leaves no file,
// and does not change the user of this process.
func TestCheckSquash(t *testing.T) {
	testenv.RequireRoot(t)
	path := t.TempDir()
	must(t, os.Chown(path, 65534, 65534))
	dir, err := os.Open(path)
	must(t, err)
	defer dir.Close()
	if err := checkSquash(dir, 65534); !errors.Is(err, volume.ErrPrecondition) || !strings.Contains(err.Error(), "no_root_squash") {
		t.Errorf("a server that maps root: got %v, want ErrPrecondition with no_root_squash", err)
	}
	must(t, checkSquash(dir, otherUser)) // the server maps all users to one
	must(t, checkSquash(dir, 0))
	if left, err := dir.Readdirnames(-1); len(left) > 0 || err != nil {
		t.Errorf("got files %q, %v; want none", left, err)
	}
	for range 100 { // so that the goroutine probably runs on all threads
		f, err := os.CreateTemp(t.TempDir(), "")
		must(t, err)
		st, err := stat(f)
		must(t, err)
		f.Close()
		if st.Uid != 0 || st.Gid != 0 {
			t.Fatalf("got files of this process with owner %d:%d, want 0:0", st.Uid, st.Gid)
		}
	}
}

// TestHasKind: HasKind tells an errno, to which explain adds a remedy, from an error that has its kind already.
func TestHasKind(t *testing.T) {
	errno := fmt.Errorf("mkdirat x: %w", syscall.EDQUOT)
	if volume.HasKind(errno) || !volume.HasKind(volume.Errorf(volume.ErrUnavailable, "%w", errno)) {
		t.Error("want HasKind to be false for an errno, and true for an error of Errorf")
	}
}

// TestVerify: verify accepts only the directory whose identity it gets.
func TestVerify(t *testing.T) {
	want, other := t.TempDir(), t.TempDir()
	dir, err := os.Open(want)
	must(t, err)
	defer dir.Close()
	id, err := identify(dir)
	must(t, err)
	for path, ok := range map[string]bool{want: true, other: false, filepath.Dir(want): false} {
		root, err := os.Open(path)
		must(t, err)
		if err := verify(volume.Volume{}, root, id); (err == nil) != ok || err != nil && !errors.Is(err, volume.ErrDamaged) {
			t.Errorf("directory %s: got %v, want success: %t", path, err, ok)
		}
		root.Close()
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
