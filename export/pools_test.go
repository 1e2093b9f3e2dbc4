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

// key returns the pool of a worker; empty without a worker.
func key(w *Worker) string {
	if w == nil {
		return ""
	}
	return w.job.Pool.Name
}

func TestByParameters(t *testing.T) {
	w := newWorld(t, defaultIntervals, startServer(t), startServer(t))
	none := newWorld(t, defaultIntervals)
	for _, tc := range []struct {
		name string
		in   map[string]string
		on   *world
		want string
		says string // of an error
	}{
		{"nothing", nil, w, "", ""},
		{"a local pool", map[string]string{"pool": "default"}, w, "", ""},
		{"loop in an nfs pool", map[string]string{"pool": "nas1"}, w, "nas1", ""},
		{"directory in an nfs pool", map[string]string{"backend": "nfs", "pool": "nas1"}, w, "nas1", ""},
		{"the first nfs pool", map[string]string{"backend": "nfs"}, w, "nas0", ""},
		{"an export", map[string]string{"server": "NAS.lan", "share": "/e/"}, w, "=nas.lan=/e", ""},
		{"loop in an export", map[string]string{"backend": "loop", "server": "fd00::1", "share": "/e"}, none, "=fd00%3a%3a1=/e", ""},
		{"no nfs pool", map[string]string{"backend": "nfs"}, none, "", "no nfs pool"},
		{"a directory in a local pool", map[string]string{"backend": "nfs", "pool": "default"}, w, "", `it has nas0, nas1`},
		{"malformed", map[string]string{"x": "y"}, w, "", `x="y"`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := ofParameters(tc.on.Pools, &csi.CreateVolumeRequest{Parameters: tc.in})
			if tc.says != "" {
				if !errors.Is(err, volume.ErrInvalid) || !strings.Contains(err.Error(), tc.says) {
					t.Errorf("error %v does not say %q", err, tc.says)
				}
				return
			}
			if err != nil || key(got) != tc.want {
				t.Errorf("%q, %v", key(got), err)
			}
		})
	}
}

func TestForNode(t *testing.T) {
	testenv.RequireRoot(t)
	w := newWorld(t, defaultIntervals, startServer(t))
	elsewhere := filepath.Join(t.TempDir(), "elsewhere") // a mount without an NFS server
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
		{"no ID", "", static, nil, "", "", nil},
		{"inline, with a server from the pod", "csi-0", inline, nil, "", "", nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := w.forNode(tc.id, tc.context, tc.flags, tc.path)
			if !errors.Is(err, tc.kind) || key(got) != tc.want {
				t.Errorf("%q, %v", key(got), err)
			}
		})
	}
}

// TestStatic: a volume without a record is staged by its server's worker.
func TestStatic(t *testing.T) {
	w := newWorld(t, defaultIntervals)
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

// TestLists: pages of all sizes contain each volume and each snapshot once.
func TestLists(t *testing.T) {
	w := newWorld(t, defaultIntervals, startServer(t), startServer(t))
	testPages(t, w, relay.Volumes, "loop:p.01234567:a", "loop:p.01234567:b", "loop:p.01234567:c", "nfs:nas0:a", "nfs:nas0:b", "nfs:nas1:a", "nfs:nas1:b")
	testPages(t, w, relay.Snapshots, "loop:p.01234567:a", "loop:p.01234567:b.000", "loop:p.01234567:b.001", "nfs:nas0:s", "nfs:nas0:t.000", "nfs:nas1:s", "nfs:nas1:t.000")
}

func testPages[E any](t *testing.T, w *world, list relay.List[E], want ...string) {
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
				t.Fatalf("%s: page %d of at most %d entries has %d", list.Method, pages, size, n)
			}
			for _, e := range entries {
				got = append(got, list.ID(e))
			}
			token = next
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: pages of %d: %q", list.Method, size, got)
		}
	}
	if _, _, err := list.Page(t.Context(), w.relay, "nfs:missing:s.000", 0); !errors.Is(err, volume.ErrStaleToken) {
		t.Errorf("%s: a token of no pool: %v", list.Method, err)
	}
}

// TestIncompleteList: a list fails while a server is silent.
func TestIncompleteList(t *testing.T) {
	server := startServer(t)
	w := newWorld(t, testIntervals, startServer(t), server)
	w.Start()
	server.setSilent(true)
	await(t, "the server to be silent", func() bool { return !w.of("nas1").Answers })
	_, err := w.controller.ListVolumes(t.Context(), &csi.ListVolumesRequest{})
	wantUnavailable(t, err, `pool "nas1"`, "has not answered since")
	if s := w.of("nas0"); !s.Running || !s.Answers {
		t.Errorf("%+v", s)
	}
}

// TestMounts: the endpoints of a server are those of the pool's mounts in the mount table.
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
			t.Errorf("%s: %+v, %v", tc.job.Pool.Name, got, err)
		}
	}
}

func nfsEntry(source, options string) *mount.Entry {
	return &mount.Entry{FSType: "nfs4", Source: source, VFSOptions: options}
}

// tableOf is a mount table.
func tableOf(entries ...*mount.Entry) func(func(*mount.Entry) bool) ([]*mount.Entry, error) {
	return func(keep func(*mount.Entry) bool) ([]*mount.Entry, error) {
		return slices.DeleteFunc(slices.Clone(entries), func(e *mount.Entry) bool { return !keep(e) }), nil
	}
}

// TestPing: a server is pinged at the addresses of its mounts, and at those of its name without mounts.
func TestPing(t *testing.T) {
	alive, dead := startServer(t), startServer(t)
	dead.refuse()
	from := func(s *nfsServer) *mount.Entry {
		return nfsEntry("nas:/e", fmt.Sprintf("vers=4.2,port=%d,proto=tcp,addr=127.0.0.1", s.port))
	}
	for _, tc := range []struct {
		name, server string
		named        *nfsServer // at the address of the name
		mounts       []*mount.Entry
		answers      bool
	}{
		{"nothing is mounted", "localhost", alive, nil, true},
		{"nothing is mounted, and the server is dead", "localhost", dead, nil, false},
		{"nothing is mounted, and the name has no address", "nas.invalid", dead, nil, true},
		{"the name has no address", "nas", alive, []*mount.Entry{from(alive)}, true},
		{"the name has another address", "nas", alive, []*mount.Entry{from(dead)}, false},
		{"one of two addresses is dead", "nas", alive, []*mount.Entry{from(alive), from(dead)}, false},
		{"cannot be pinged", "nas", dead, []*mount.Entry{nfsEntry("nas:/e", "proto=rdma,addr=127.0.0.1")}, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := newServer(Job{Pool: pool.Config{NFS: &pool.NFS{Server: tc.server, Export: "/e", MountOptions: []string{fmt.Sprintf("port=%d", tc.named.port)}}}})
			s.table = tableOf(tc.mounts...)
			if err := s.ping(t.Context()); (err == nil) != tc.answers {
				t.Errorf("%v", err)
			}
		})
	}
}

// TestRefused: calls that mount are refused; calls that unmount are not.
func TestRefused(t *testing.T) {
	w := newWorld(t, defaultIntervals, startServer(t))
	w.options.Refused = volume.Errorf(volume.ErrPrecondition, "no NFS here")
	static := map[string]string{"server": "localhost", "share": "/s"}
	for id, volumeContext := range map[string]map[string]string{"nfs:nas0:v": nil, "handle": static} {
		_, err := w.node.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: "/nowhere", VolumeContext: volumeContext})
		if !errors.Is(err, volume.ErrPrecondition) || !strings.Contains(err.Error(), id) {
			t.Errorf("staging %s: %v", id, err)
		}
		_, err = w.node.NodePublishVolume(t.Context(), &csi.NodePublishVolumeRequest{VolumeId: id, StagingTargetPath: "/nowhere", VolumeContext: volumeContext})
		if !errors.Is(err, volume.ErrPrecondition) {
			t.Errorf("publishing %s: %v", id, err)
		}
	}
	if err := w.unstage(t.Context(), "nfs:nas0:v"); err != nil {
		t.Errorf("unstaging: %v", err)
	}
}
