package worker

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/volume"
)

// key is the pool that a worker is for; empty for none.
func key(w *Worker) string {
	if w == nil {
		return ""
	}
	return w.job.Pool.Name
}

func TestByParameters(t *testing.T) {
	w := newWorld(t, usual, startServer(t), startServer(t))
	none := newWorld(t, usual)
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
		{"malformed", map[string]string{"x": "y"}, w, "", `"x"`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := tc.on.byParameters(tc.in)
			if tc.says != "" {
				if !errors.Is(err, volume.ErrInvalid) || !strings.Contains(err.Error(), tc.says) {
					t.Errorf("error %v does not say %q", err, tc.says)
				}
				return
			}
			if err != nil || key(got) != tc.want {
				t.Errorf("%q, %v", key(got), err)
			}
			p, err := volume.ParseParameters(tc.in)
			if err != nil || tc.on.Shared(p) != (tc.want != "") {
				t.Errorf("Shared is %t, %v", tc.on.Shared(p), err)
			}
		})
	}
}

func TestOnNode(t *testing.T) {
	testenv.RequireRoot(t)
	w := newWorld(t, usual, startServer(t))
	elsewhere := filepath.Join(t.TempDir(), "elsewhere") // mounted, and not of a server
	if err := os.Mkdir(elsewhere, 0o755); err != nil {
		t.Fatal(err)
	}
	testenv.Run(t, "mount", "-t", "tmpfs", "server:/export", elsewhere)
	t.Cleanup(func() { testenv.Run(t, "umount", elsewhere) })
	static := map[string]string{"server": "Other.lan", "share": "/s"}
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
		{"pool that is not here", "nfs:gone:v", nil, nil, "/nowhere", "", volume.ErrUnavailable},
		{"static", "other#handle", static, nil, "/nowhere", "static other.lan", nil},
		{"static at a port", "other#handle", static, []string{"vers=4,port=2050"}, "", "static other.lan 2050", nil},
		{"static of no server", "other#handle", map[string]string{"server": "a/b", "share": "/s"}, nil, "", "", volume.ErrInvalid},
		{"nothing is known of it", "other#handle", nil, nil, "/nowhere", "", nil},
		{"something else is mounted", "other#handle", nil, nil, elsewhere, "", nil},
		{"relative path", "other#handle", nil, nil, "a/b", "", nil},
		{"no ID", "", static, nil, "", "", nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := w.onNode(tc.id, tc.context, tc.flags, tc.path)
			if !errors.Is(err, tc.kind) || key(got) != tc.want {
				t.Errorf("%q, %v", key(got), err)
			}
		})
	}
}

// TestStatic: a volume without a record is staged by its server's worker.
func TestStatic(t *testing.T) {
	w := newWorld(t, usual)
	_, err := w.node.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{
		VolumeId: "handle", StagingTargetPath: "/nowhere", VolumeContext: map[string]string{"server": "localhost", "share": "/s"},
	})
	if status.Code(err) != codes.DataLoss || status.Convert(err).Message() != "static localhost" {
		t.Errorf("it did not reach the worker: %v", err)
	}
	for _, s := range w.States() {
		if s.Report != nil {
			t.Errorf("it is taken for a pool: %+v", s)
		}
	}
}

// TestListVolumes: pages of all sizes show all volumes once.
func TestListVolumes(t *testing.T) {
	w := newWorld(t, usual, startServer(t), startServer(t))
	want := []string{"loop:p.01234567:a", "loop:p.01234567:b", "loop:p.01234567:c", "nfs:nas0:a", "nfs:nas0:b", "nfs:nas1:a", "nfs:nas1:b"}
	for size := range int32(9) {
		var got []string
		token := ""
		for pages := 0; pages == 0 || token != ""; pages++ {
			resp, err := w.controller.ListVolumes(t.Context(), &csi.ListVolumesRequest{StartingToken: token, MaxEntries: size})
			if err != nil {
				t.Fatal(err)
			}
			if n := len(resp.GetEntries()); pages > len(want) || size > 0 && n > int(size) {
				t.Fatalf("page %d of at most %d entries has %d", pages, size, n)
			}
			for _, e := range resp.GetEntries() {
				got = append(got, e.GetVolume().GetVolumeId())
			}
			token = resp.GetNextToken()
		}
		if !slices.Equal(got, want) {
			t.Errorf("pages of %d: %q", size, got)
		}
	}
	_, err := w.controller.ListVolumes(t.Context(), &csi.ListVolumesRequest{StartingToken: "nfs:gone:v"})
	if !errors.Is(err, volume.ErrStaleToken) {
		t.Errorf("a token of no pool: %v", err)
	}
}

// TestIncompleteList: with a silent server there is no list.
func TestIncompleteList(t *testing.T) {
	server := startServer(t)
	w := newWorld(t, quickly, startServer(t), server)
	w.Start()
	server.setSilent(true)
	await(t, "the server to be silent", func() bool { return !w.of("nas1").Answers })
	_, err := w.controller.ListVolumes(t.Context(), &csi.ListVolumesRequest{})
	wantUnavailable(t, err, `pool "nas1"`, "has not answered since")
	if s := w.of("nas0"); !s.Running || !s.Answers {
		t.Errorf("%+v", s)
	}
}

func TestServerOf(t *testing.T) {
	for _, tc := range []struct {
		options []string
		port    string
		tcp     bool
	}{
		{nil, "2049", true},
		{[]string{"nfsvers=4.2,hard"}, "2049", true},
		{[]string{"nfsvers=3"}, "", true},
		{[]string{"vers=3,port=0"}, "", true},
		{[]string{"v3", "port=2050"}, "2050", true},
		{[]string{"port=1", "hard,port=2"}, "2", true},
		{[]string{"proto=tcp6"}, "2049", true},
		{[]string{"proto=rdma"}, "2049", false},
	} {
		w := newWorld(t, usual, startServer(t))
		n := *w.options.Pools[0].NFS
		n.MountOptions = tc.options
		if s := newServer(&n); s.port != tc.port || s.tcp != tc.tcp {
			t.Errorf("%q: %q, %t", tc.options, s.port, s.tcp)
		}
	}
}
