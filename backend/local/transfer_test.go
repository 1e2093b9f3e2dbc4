package local_test

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/local"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/internal/treetest"
	"github.com/trivet-csi/trivet/linux/clone"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// TestTransfer: a snapshot and a volume are created on other nodes with all that a local copy keeps, also on another type of
// filesystem. A volume on btrfs can be in use meanwhile.
func TestTransfer(t *testing.T) {
	for _, from := range []string{"xfs", "btrfs"} {
		t.Run(from, func(t *testing.T) {
			dirs := []string{testenv.Filesystem(t, from, "2G"), testenv.Filesystem(t, from, "2G")}
			if from != "btrfs" { // it has flags that the others do not have
				dirs = append(dirs, testenv.Filesystem(t, "btrfs", "2G"), testenv.Filesystem(t, "ext4", "2G"))
			}
			c := backendtest.StartCluster(t, dirs, local.Kind)
			tr := &backendtest.Transfers{Cluster: c, Capability: backendtest.Directories()[0].Capability(backendtest.CapabilityOf("").GetAccessMode().GetMode()), Class: map[string]string{"backend": local.Name}}
			source := tr.Create(t, 0, "v", 512<<20, nil)
			data := func(node int, name string) string { return filepath.Join(dirs[node], "volumes", name, "data") }
			if from == "btrfs" {
				source.Publish(t)
			}
			treetest.Make(t, data(0, "v"), 3)
			snapshot := tr.Snapshot(t, source, "s")
			for node := 1; node < len(dirs); node++ {
				for name, content := range map[string]*backendtest.NodeVolume{
					"snapshot": tr.Create(t, node, fmt.Sprintf("s-%d", node), 512<<20, snapshot),
					"volume":   tr.Create(t, node, fmt.Sprintf("v-%d", node), 512<<20, source.Source()),
				} {
					to := data(node, fmt.Sprintf("%c-%d", name[0], node))
					treetest.Compare(t, data(0, "v"), to)
					content.Publish(t)
					content.Unpublish(t)
				}
			}
		})
	}
}

func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

// directoryTransfers starts a cluster with a pool in each directory. received returns how many bytes a node has received.
func directoryTransfers(t *testing.T, dirs []string) (tr *backendtest.Transfers, received func(node int) int64) {
	t.Helper()
	var configs []pool.Config
	for _, dir := range dirs {
		configs = append(configs, pool.Config{Name: "default", Directory: pool.Directory{Path: dir}})
	}
	var web []string
	c := backendtest.StartClusterOn(t, configs, func(o *driver.Options) {
		o.HTTPAddress = backendtest.FreeAddress(t)
		web = append(web, o.HTTPAddress)
	}, local.Kind)
	capability := backendtest.Directories()[0].Capability(backendtest.CapabilityOf("").GetAccessMode().GetMode())
	tr = &backendtest.Transfers{Cluster: c, Capability: capability, Class: map[string]string{"backend": local.Name}}
	metric := regexp.MustCompile(`trivet_transferred_bytes_total\{direction="received"\} (\S+)`)
	return tr, func(node int) int64 {
		t.Helper()
		resp, err := http.Get("http://" + web[node] + "/metrics")
		must(t, err)
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		must(t, err)
		found := metric.FindSubmatch(text)
		if found == nil {
			t.Fatalf("got no number of received bytes in %q", text)
		}
		bytes, err := strconv.ParseFloat(string(found[1]), 64)
		must(t, err)
		return int64(bytes)
	}
}

// indexSize returns the size of the index of a directory that is sent.
func indexSize(t *testing.T, dir string) int64 {
	t.Helper()
	root, err := os.Open(dir)
	must(t, err)
	packed, err := clone.Pack(t.Context(), root, func() (*os.File, error) {
		return os.OpenFile(t.TempDir(), unix.O_TMPFILE|os.O_RDWR, 0o600)
	})
	must(t, err)
	must(t, packed.Close())
	return packed.IndexSize
}

// TestDifferences: only the changes since an earlier snapshot are received if a volume with its content was not used yet.
func TestDifferences(t *testing.T) {
	const size, files, changed = 512 << 20, 64, 640 << 10
	dirs := []string{testenv.SimpleQuotas(t, "2G"), testenv.SimpleQuotas(t, "2G"), testenv.Filesystem(t, "xfs", "2G"), testenv.Filesystem(t, "ext4", "2G")}
	tr, received := directoryTransfers(t, dirs)
	data := func(node int, name string) string { return filepath.Join(dirs[node], "volumes", name, "data") }
	source := tr.Create(t, 0, "v", size, nil)
	source.Publish(t)
	for _, dir := range []string{"many", "few"} {
		must(t, os.Mkdir(filepath.Join(data(0, "v"), dir), 0o755))
	}
	content := make([]byte, 1<<20)
	path := func(dir string, i int) string { return filepath.Join(data(0, "v"), dir, fmt.Sprint(i)) }
	for i := range files {
		_, _ = rand.Read(content)
		must(t, os.WriteFile(path("many", i), content, 0o600))
		must(t, os.WriteFile(path("few", i), content[:2000], 0o600))
	}
	first := tr.Snapshot(t, source, "s1")
	older := map[int]*backendtest.NodeVolume{}
	for node := 1; node < len(dirs); node++ {
		older[node] = tr.Create(t, node, fmt.Sprintf("older-%d", node), size, first)
	}

	must(t, os.Rename(filepath.Join(data(0, "v"), "many"), filepath.Join(data(0, "v"), "moved")))
	for i := range 10 {
		f, err := os.OpenFile(path("moved", i), os.O_WRONLY, 0)
		must(t, err)
		_, err = f.WriteAt(content[:changed/10], int64(i)*4096)
		must(t, errors.Join(err, f.Close()))
	}
	must(t, os.Link(path("moved", 20), filepath.Join(data(0, "v"), "a link")))
	must(t, os.Remove(path("moved", 21)))
	second := tr.Snapshot(t, source, "s2")
	index := indexSize(t, data(0, "v"))
	const whole = files << 20
	create := func(node int, name string, most int64) *backendtest.NodeVolume {
		t.Helper()
		before := received(node)
		created := tr.Create(t, node, name, size, second)
		treetest.Compare(t, data(0, "v"), data(node, name))
		bytes := received(node) - before
		t.Logf("node %d received %d bytes for %s, of which the index has %d", node, bytes, name, index)
		if bytes > most || most > whole && bytes < whole/2 {
			t.Errorf("node %d: got %d bytes for %s, want about %d", node, bytes, name, most)
		}
		return created
	}
	differences := changed*12/10 + index
	newer := map[int]*backendtest.NodeVolume{1: create(1, "newer-1", differences), 2: create(2, "newer-2", differences)}
	create(3, "newer-3", whole+index) // it cannot share blocks

	// The limit of the volume that has written shared data allows for it.
	b, err := os.ReadFile(filepath.Join(dirs[1], "volumes", "newer-1", "volume.json"))
	must(t, err)
	var record struct{ Source *volume.Source }
	must(t, json.Unmarshal(b, &record))
	if s := record.Source; s == nil || s.Shared < whole/2 || len(s.Owners) != 1 || s.Owners[0].String() != older[1].ID {
		t.Errorf("got source %+v, want one that shares most of its data with volume %s", record.Source, older[1].ID)
	}

	// A volume that was used is no base any more, nor is one whose files were changed.
	older[2].Publish(t)
	older[2].Unpublish(t)
	newer[2].Delete(t)
	create(2, "again-2", whole+index)
	changedFile := filepath.Join(data(1, "older-1"), "many", "30")
	must(t, os.WriteFile(changedFile, content, 0o600))
	newer[1].Delete(t)
	_, err = tr.Router.Control.CreateVolume(t.Context(), tr.Request(1, "again-1", size, second))
	if status.Code(err) != codes.Unavailable {
		t.Errorf("a base that was changed: got %v, want %v", err, codes.Unavailable)
	}
	create(1, "again-1", whole+index)
}
