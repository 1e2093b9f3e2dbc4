package export

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/internal/relay"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// poolOf returns the name of the pool of a worker, or an empty string for nil.
func poolOf(w *Worker) string {
	if w == nil {
		return ""
	}
	return w.job.Pool.Name
}

// TestByParameters: the parameters of a new volume select its worker.
func TestByParameters(t *testing.T) {
	w := newDriver(t, defaultIntervals, startServer(t), startServer(t))
	without := newDriver(t, defaultIntervals) // no nfs pool is configured
	for _, tc := range []struct {
		name string
		in   map[string]string
		on   *testDriver
		want string
		says string // part of the error
	}{
		{"no parameters", nil, w, "", ""},
		{"a local pool", map[string]string{"pool": "default"}, w, "", ""},
		{"loop in an nfs pool", map[string]string{"pool": "nas1"}, w, "nas1", ""},
		{"directory in an nfs pool", map[string]string{"backend": "nfs", "pool": "nas1"}, w, "nas1", ""},
		{"backend nfs without a pool", map[string]string{"backend": "nfs"}, w, "nas0", ""},
		{"directory on an export", map[string]string{"server": "NAS.lan", "share": "/e/"}, w, "=nas.lan=/e", ""},
		{"loop on an export", map[string]string{"backend": "loop", "server": "fd00::1", "share": "/e"}, without, "=fd00%3a%3a1=/e", ""},
		{"backend nfs without an nfs pool", map[string]string{"backend": "nfs"}, without, "", "no nfs pool"},
		{"backend nfs in a local pool", map[string]string{"backend": "nfs", "pool": "default"}, w, "", `it has nas0, nas1`},
		{"unknown parameter", map[string]string{"x": "y"}, w, "", `x="y"`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := ofParameters(tc.on.Pools, &csi.CreateVolumeRequest{Parameters: tc.in})
			if tc.says != "" {
				if !errors.Is(err, volume.ErrInvalid) || !strings.Contains(err.Error(), tc.says) {
					t.Errorf("got error %v, want ErrInvalid that contains %q", err, tc.says)
				}
				return
			}
			if err != nil || poolOf(got) != tc.want {
				t.Errorf("got worker %q, %v; want %q", poolOf(got), err, tc.want)
			}
		})
	}
}

// TestForNode: the volume ID, the volume context or the mount at the path selects the worker of a call of
// the Node service.
func TestForNode(t *testing.T) {
	testenv.RequireRoot(t)
	w := newDriver(t, defaultIntervals, startServer(t))
	elsewhere := filepath.Join(t.TempDir(), "elsewhere") // the target of a mount that is not NFS
	if err := os.Mkdir(elsewhere, 0o755); err != nil {
		t.Fatal(err)
	}
	testenv.Run(t, "mount", "-t", "tmpfs", "server:/export", elsewhere)
	t.Cleanup(func() { testenv.Run(t, "umount", elsewhere) })
	static := map[string]string{"server": "Other.lan", "share": "/s"}
	inline := map[string]string{"server": "Other.lan", "share": "/s", "csi.storage.k8s.io/ephemeral": "true"}
	for _, tc := range []struct {
		name, id string
		context  map[string]string
		flags    []string
		path     string
		want     string
		kind     error
	}{
		{"node-local", "loop:p.01234567:v", static, nil, elsewhere, "", nil},
		{"nfs pool", "nfs:nas0:v", static, nil, elsewhere, "nas0", nil},
		{"image in an nfs pool", "loop:nas0:v", nil, nil, "", "nas0", nil},
		{"export", "nfs:=nas.lan=/e:v", nil, nil, "", "=nas.lan=/e", nil},
		{"unknown pool", "nfs:missing:v", nil, nil, "/nowhere", "", volume.ErrUnavailable},
		{"static", "other#handle", static, nil, "/nowhere", "static other.lan", nil},
		{"static at a port", "other#handle", static, []string{"vers=4,port=2050"}, "", "static other.lan port=2050", nil},
		{"static over RDMA", "other#handle", static, []string{"rdma", "port=20049"}, "", "static other.lan proto=rdma", nil},
		{"static in another case", "other#handle", map[string]string{"Server": "Other.lan", "SHARE": "/s"}, nil, "/nowhere", "static other.lan", nil},
		{"static without a share", "other#handle", map[string]string{"server": "other.lan"}, nil, "/nowhere", "static other.lan", nil},
		{"share without a server", "other#handle", map[string]string{"share": "/s"}, nil, "/nowhere", "", volume.ErrInvalid},
		{"static with an invalid server", "other#handle", map[string]string{"server": "a/b", "share": "/s"}, nil, "", "", volume.ErrInvalid},
		{"unknown volume", "other#handle", nil, nil, "/nowhere", "", nil},
		{"another filesystem at the path", "other#handle", nil, nil, elsewhere, "", nil},
		{"relative path", "other#handle", nil, nil, "a/b", "", nil},
		{"static without an ID", "", static, nil, "", "", nil},
		{"inline, with a server from the pod", "csi-0", inline, nil, "", "", nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := w.forNode(tc.id, tc.context, tc.flags, tc.path)
			if !errors.Is(err, tc.kind) || poolOf(got) != tc.want {
				t.Errorf("got worker %q, %v; want %q, %v", poolOf(got), err, tc.want, tc.kind)
			}
		})
	}
}

// TestStatic: the worker of a server stages the static volumes of the server. It is not reported as a pool.
func TestStatic(t *testing.T) {
	w := newDriver(t, defaultIntervals)
	_, err := w.node.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{
		VolumeId: "handle", StagingTargetPath: "/nowhere", VolumeContext: map[string]string{"server": "localhost", "share": "/s"},
	})
	if status.Code(err) != codes.DataLoss || status.Convert(err).Message() != "static localhost" {
		t.Errorf("the call did not reach the worker: %v", err)
	}
	for _, s := range w.States() {
		if s.Report != nil {
			t.Errorf("the server is reported as a pool: %+v", s)
		}
	}
}

// TestLists: with pages of any size, a list contains each volume or snapshot once.
func TestLists(t *testing.T) {
	w := newDriver(t, defaultIntervals, startServer(t), startServer(t))
	testPages(t, w, relay.Volumes, "loop:p.01234567:a", "loop:p.01234567:b", "loop:p.01234567:c", "nfs:nas0:a", "nfs:nas0:b", "nfs:nas1:a", "nfs:nas1:b")
	testPages(t, w, relay.Snapshots, "loop:p.01234567:a", "loop:p.01234567:b.000", "loop:p.01234567:b.001", "nfs:nas0:s", "nfs:nas0:t.000", "nfs:nas1:s", "nfs:nas1:t.000")
}

// testPages checks that the pages of a list contain the IDs want.
func testPages[E any](t *testing.T, w *testDriver, list relay.List[E], want ...string) {
	t.Helper()
	for size := range int32(9) {
		var got []string
		token := ""
		for pages := 0; pages == 0 || token != ""; pages++ {
			entries, next, err := list.Page(t.Context(), w.relay, token, size)
			if err != nil {
				t.Fatal(err)
			}
			if n := len(entries); pages > len(want) || size > 0 && n > int(size) {
				t.Fatalf("%s: page %d has %d entries, want at most %d in at most %d pages", list.Method, pages, n, size, len(want)+1)
			}
			for _, e := range entries {
				got = append(got, list.ID(e))
			}
			token = next
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s, pages of %d: got %q, want %q", list.Method, size, got, want)
		}
	}
	if _, _, err := list.Page(t.Context(), w.relay, "nfs:missing:s.000", 0); !errors.Is(err, volume.ErrStaleToken) {
		t.Errorf("%s with a token of an unknown pool: got %v, want ErrStaleToken", list.Method, err)
	}
}

// TestIncompleteList: a list fails while a server is silent.
func TestIncompleteList(t *testing.T) {
	server := startServer(t)
	w := newDriver(t, testIntervals, startServer(t), server)
	w.Start()
	server.setSilent(true)
	await(t, "the server to count as silent", func() bool { return !w.of("nas1").Answers })
	_, err := w.controller.ListVolumes(t.Context(), &csi.ListVolumesRequest{})
	wantUnavailable(t, err, `pool "nas1"`, "has not answered since")
	if s := w.of("nas0"); !s.Running || !s.Answers {
		t.Errorf("pool of the other server: got %+v, want a running process and a server that answers", s)
	}
}

// TestMounts: mounted returns the endpoints of those mounts in the mount table that belong to the pool.
func TestMounts(t *testing.T) {
	nas := pool.Config{Name: "nas", NFS: &pool.NFS{Server: "[FD00::1]", Export: "/tank/"}}
	static := pool.Config{Name: "static fd00::1 port=2050", NFS: &pool.NFS{Server: "fd00::1", Export: "/", MountOptions: []string{"port=2050"}}}
	table := []*mount.Entry{
		nfsEntry("[FD00::1]:/tank", "vers=4.2,proto=tcp6,addr=fd00::1"),
		nfsEntry("[fd00::1]:/tank/volumes/v/data", "vers=4.2,proto=tcp6,addr=fd00::1"),
		nfsEntry("[fd00::1]:/tank/volumes/w/data", "vers=3,proto=tcp6,addr=fd00::2"),
		nfsEntry("[fd00::1]:/tank/volumes/x/data", "vers=4.2,port=20049,proto=rdma6,addr=fd00::1"),
		nfsEntry("[fd00::1]:/tanks", "vers=4.2,proto=tcp6,addr=fd00::3"),
		nfsEntry("[fd00::1]:/s", "vers=4.2,port=2050,proto=tcp6,addr=fd00::4"),
		nfsEntry("[fd00::2]:/tank", "vers=4.2,port=2050,proto=tcp6,addr=fd00::5"),
		{FSType: "tmpfs", Source: "[fd00::1]:/tank", VFSOptions: "addr=fd00::6"},
	}
	for _, tc := range []struct {
		job  Job
		want []mount.Endpoint
	}{
		{Job{Pool: nas}, []mount.Endpoint{{Address: "fd00::1"}, {Address: "fd00::2", Portmapped: true}, {Address: "fd00::1", Proto: "rdma"}}},
		{Job{Pool: static, Static: true}, []mount.Endpoint{{Address: "fd00::4", Port: "2050"}}},
	} {
		s := newServer(tc.job)
		s.table = tableOf(table...)
		if got, err := s.mounted(); err != nil || !slices.Equal(got, tc.want) {
			t.Errorf("%s: got %+v, %v; want %+v", tc.job.Pool.Name, got, err, tc.want)
		}
	}
}

func nfsEntry(source, options string) *mount.Entry {
	return &mount.Entry{FSType: "nfs4", Source: source, VFSOptions: options}
}

// tableOf returns a function that reads a mount table with the given entries, like mount.Table.
func tableOf(entries ...*mount.Entry) func(func(*mount.Entry) bool) ([]*mount.Entry, error) {
	return func(keep func(*mount.Entry) bool) ([]*mount.Entry, error) {
		return slices.DeleteFunc(slices.Clone(entries), func(e *mount.Entry) bool { return !keep(e) }), nil
	}
}

// TestPing: a server is pinged at the addresses of the pool's mounts. Without mounts it is pinged at the
// addresses of its name.
func TestPing(t *testing.T) {
	alive, dead := startServer(t), startServer(t)
	dead.refuse()
	from := func(s *nfsServer) *mount.Entry {
		return nfsEntry("nas:/e", fmt.Sprintf("vers=4.2,port=%d,proto=tcp,addr=127.0.0.1", s.port))
	}
	for _, tc := range []struct {
		name, server string
		named        *nfsServer // server at the address of the name
		mounts       []*mount.Entry
		answers      bool
	}{
		{"no mount, server alive", "localhost", alive, nil, true},
		{"no mount, server dead", "localhost", dead, nil, false},
		{"no mount, name without an address", "nas.invalid", dead, nil, true},
		{"mount from a live server, name without an address", "nas", alive, []*mount.Entry{from(alive)}, true},
		{"mount from a dead server, name without an address", "nas", alive, []*mount.Entry{from(dead)}, false},
		{"mounts from a live and a dead address", "nas", alive, []*mount.Entry{from(alive), from(dead)}, false},
		{"mount with RDMA, which cannot be pinged", "nas", dead, []*mount.Entry{nfsEntry("nas:/e", "proto=rdma,addr=127.0.0.1")}, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := newServer(Job{Pool: pool.Config{NFS: &pool.NFS{Server: tc.server, Export: "/e", MountOptions: []string{fmt.Sprintf("port=%d", tc.named.port)}}}})
			s.table = tableOf(tc.mounts...)
			if err := s.ping(t.Context()); (err == nil) != tc.answers {
				t.Errorf("got error %v, want an answer: %t", err, tc.answers)
			}
		})
	}
}

// TestRefused: if Options.Refused is set, calls that mount fail. Calls that unmount succeed.
func TestRefused(t *testing.T) {
	w := newDriver(t, defaultIntervals, startServer(t))
	w.options.Refused = volume.Errorf(volume.ErrPrecondition, "no NFS here")
	static := map[string]string{"server": "localhost", "share": "/s"}
	for id, volumeContext := range map[string]map[string]string{"nfs:nas0:v": nil, "handle": static} {
		_, err := w.node.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: "/nowhere", VolumeContext: volumeContext})
		if !errors.Is(err, volume.ErrPrecondition) || !strings.Contains(err.Error(), id) {
			t.Errorf("stage of %s: got %v, want ErrPrecondition with the ID", id, err)
		}
		_, err = w.node.NodePublishVolume(t.Context(), &csi.NodePublishVolumeRequest{VolumeId: id, StagingTargetPath: "/nowhere", VolumeContext: volumeContext})
		if !errors.Is(err, volume.ErrPrecondition) {
			t.Errorf("publish of %s: got %v, want ErrPrecondition", id, err)
		}
	}
	if err := w.unstage(t.Context(), "nfs:nas0:v"); err != nil {
		t.Errorf("unstage: %v", err)
	}
}
