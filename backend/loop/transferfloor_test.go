package loop_test

import (
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/klauspost/compress/zstd"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/cluster/pki"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/pool"
)

// BenchmarkTransfer restores a snapshot of 512 MiB on another node, and in turns copies the snapshot's image with the floor. It
// reports the throughput of the driver divided by that of the floor (medians). The driver leaves half of the time of the disk to others.
func BenchmarkTransfer(b *testing.B) {
	const size = 512 << 20
	random := make([]byte, size)
	_, _ = rand.Read(random)
	words := []string{"volume ", "snapshot ", "node ", "transfer ", "pool ", "image ", "claim\n", "byte "}
	var text strings.Builder
	for i := range size / 5 {
		text.WriteString(words[random[i]%8])
	}
	for name, tc := range map[string]struct {
		content    []byte
		compressed bool
	}{"random": {random, false}, "text": {[]byte(text.String()[:size]), true}} {
		b.Run(name, func(b *testing.B) {
			dir := testenv.Filesystem(b, "xfs", "24G")
			var pools []pool.Config
			for _, name := range []string{"a", "b"} {
				pools = append(pools, pool.Config{Name: "default", Directory: pool.Directory{Path: filepath.Join(dir, name)}, BackgroundBytesPerSecond: "1Ti"})
			}
			c := backendtest.StartClusterOn(b, pools, nil, loop.Kind)
			tr := &backendtest.Transfers{Cluster: c, Capability: backendtest.CapabilityOf("")}
			source := tr.Create(b, 0, "v", size, nil)
			source.Publish(b)
			source.Write(b, tc.content, 0)
			from := tr.Snapshot(b, source, "s")
			source.Unpublish(b)
			image := filepath.Join(dir, "a/volumes/v/image") // shares its blocks with the snapshot
			f := newFloor(b, c, tc.compressed)
			var byDriver, byFloor []time.Duration
			b.SetBytes(size)
			for b.Loop() {
				byDriver = append(byDriver, timeOf(func() { restoreOnce(b, tr, size, from) }))
				byFloor = append(byFloor, timeOf(func() { f.copy(b, image, filepath.Join(dir, "copy")) }))
			}
			b.ReportMetric(median(byFloor).Seconds()/median(byDriver).Seconds(), "x-floor")
		})
	}
}

// restoreOnce restores a snapshot on the second node, and deletes the new volume.
func restoreOnce(b *testing.B, tr *backendtest.Transfers, size int64, from *csi.VolumeContentSource) {
	b.Helper()
	tr.Create(b, 1, "restored", size, from).Delete(b)
}

func timeOf(f func()) time.Duration {
	begin := time.Now()
	f()
	return time.Since(begin)
}

func median(all []time.Duration) time.Duration {
	slices.Sort(all)
	return all[len(all)/2]
}

// floor copies files through TLS connections on the loopback device: it reads, compresses with zstd, sends, receives, decompresses,
// writes, and syncs once. It has no checksums and cannot continue after an interruption.
type floor struct {
	listener   net.Listener
	client     *tls.Config
	compressed bool
}

func newFloor(b *testing.B, c *backendtest.Cluster, compressed bool) *floor {
	b.Helper()
	dir, who := b.TempDir(), pki.NodeURI(backendtest.DriverName, "floor")
	c.Certify(b, dir, who, x509.ExtKeyUsageServerAuth)
	certificates := pki.OpenDirectory(dir)
	l, err := tls.Listen("tcp", "127.0.0.1:0", certificates.PeerServer(backendtest.DriverName, "floor"))
	must(b, err)
	b.Cleanup(func() { _ = l.Close() })
	return &floor{l, certificates.PeerClient(who, "floor"), compressed}
}

// copy copies a file, and removes the copy.
func (f *floor) copy(b *testing.B, from, to string) {
	b.Helper()
	source, err := os.Open(from)
	must(b, err)
	defer source.Close()
	target, err := os.Create(to)
	must(b, err)
	defer target.Close()
	sent := make(chan error, 1)
	go func() { sent <- f.send(source) }()
	conn, err := f.listener.Accept()
	must(b, err)
	defer func() { _ = conn.Close() }()
	must(b, f.receive(target, conn))
	must(b, errors.Join(<-sent, target.Sync(), os.Remove(to)))
}

// send compresses in one goroutine and sends in another, as two processes that are connected by a pipe.
func (f *floor) send(source io.Reader) error {
	conn, err := tls.Dial("tcp", f.listener.Addr().String(), f.client)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	if f.compressed {
		out, in := io.Pipe()
		go func(source io.Reader) {
			w, err := zstd.NewWriter(in, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(1))
			if err == nil {
				err = errors.Join(stream(w, source), w.Close())
			}
			_ = in.CloseWithError(err)
		}(source)
		source = out
	}
	return errors.Join(stream(conn, source), conn.CloseWrite())
}

func (f *floor) receive(target io.Writer, from io.Reader) error {
	if f.compressed {
		r, err := zstd.NewReader(from, zstd.WithDecoderConcurrency(1))
		if err != nil {
			return err
		}
		defer r.Close()
		from = r
	}
	return stream(target, from)
}

// stream copies with reads of at most 1 MiB.
func stream(to io.Writer, from io.Reader) error {
	_, err := io.CopyBuffer(struct{ io.Writer }{to}, struct{ io.Reader }{from}, make([]byte, 1<<20))
	return err
}
