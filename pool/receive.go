package pool

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/internal/atomicfile"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/linux/background"
	"github.com/trivet-csi/trivet/linux/clone"
	"github.com/trivet-csi/trivet/pool/beneath"
	"github.com/trivet-csi/trivet/pool/ledger"
	"github.com/trivet-csi/trivet/volume"
)

const (
	// receivedDir contains the volumes that are being received from other nodes, each in a folder with the name of the new
	// volume. Unlike the entries of tmp, they stay when the driver restarts, so that the transfer continues.
	receivedDir = ".trivet/received"
	// progressFile records how much of a volume was received.
	progressFile = "progress.json"
	// baseAlignment is a multiple of the block size of every filesystem.
	baseAlignment = 1 << 20
	// receivedLifetime is how long an incomplete volume stays without a call that receives the rest of it.
	receivedLifetime = time.Hour
)

func receivedPath(name string) string { return receivedDir + "/" + name }

// progress is the content of progressFile. What it says is durable in the image or on the storage.
type progress struct {
	// Identity is that of the content (volume.Manifest).
	Identity string `json:"identity"`
	// Layout is that of a directory (volume.PackedTree).
	Layout string `json:"layout,omitempty"`
	// Base is the identity of the content of which the image, or files of the directory, have the bytes that are not sent; empty for
	// zeros.
	Base string `json:"base,omitempty"`
	// Whole means that the whole content is received, because the blocks of the bases cannot be shared.
	Whole bool `json:"whole,omitempty"`
	// Verified is the offset up to which the image is complete, Bytes the size of the data before it, in bytes.
	Verified int64 `json:"verifiedBytes"`
	Bytes    int64 `json:"bytes"`
	// Made means that all entries of a directory were made.
	Made bool `json:"made,omitempty"`
}

// receiving are the images of a node-local pool that are being received.
type receiving struct {
	mu sync.Mutex
	// idle has the time since which no call has received each image; running are those that a call receives now.
	idle    map[string]time.Time
	running map[string]bool
}

// begin marks an image as running.
func (r *receiving) begin(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.running[name] = true
	delete(r.idle, name)
}

// end marks an image as idle.
func (r *receiving) end(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.running, name)
	r.idle[name] = time.Now()
}

// ifExpired calls discard if an image has been idle for receivedLifetime, since the driver has started. Meanwhile no call
// begins to receive an image.
func (r *receiving) ifExpired(name string, now time.Time, discard func() error) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.running[name] {
		return nil
	}
	since, known := r.idle[name]
	if !known {
		r.idle[name] = now
	}
	if !known || now.Sub(since) < receivedLifetime {
		return nil
	}
	delete(r.idle, name)
	return discard()
}

// forget drops an image that no longer exists.
func (r *receiving) forget(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.idle, name)
}

// Partial is the image of a volume that is being received, its device on the storage of the pool, or its directory. Only one
// Partial of a name exists at a time.
type Partial struct {
	// Image is complete and durable before Verified. After Begin it has at least the size of the content. It is the index of a
	// directory.
	Image *os.File
	// to writes to Image.
	to *background.Writer
	progress
	pool *Pool
	// v has only the name until the record is known.
	v       volume.Volume
	content volume.Manifest
	dir     *os.Root
	// data is nil for an image and a directory. Otherwise the bytes before the offset written are those of the content.
	data    ReceivedData
	written int64
	// directory is the directory of a volume, and tree writes to it; nil until the index is complete, and for an image.
	directory *os.File
	tree      *clone.Unpacked
	// alive is that of Begin.
	alive func()
	// each is called for each entry of the directory that is made. It ends the call with its error.
	each func() error
	// withBase calls a function with the directory of the volume with the base, which no call attaches meanwhile, and with its
	// record. Without a base, the directory is nil.
	withBase func(func(base *os.File, v volume.Volume) error) error
	// stored is the size of the data in the files of the directory, in bytes.
	stored int64
}

// Receive begins or continues to receive the image of a volume, and reserves the volume's size. An image that was received from
// other content is discarded.
func (p *Pool) Receive(ctx context.Context, v volume.Volume, content volume.Manifest) (*Partial, error) {
	return p.receive(ctx, &Partial{pool: p, v: v, content: content})
}

// ReceiveOnStorage is Receive for a volume with a name whose data is on the storage of the pool.
func (p *Pool) ReceiveOnStorage(ctx context.Context, name string, content volume.Manifest, data ReceivedData) (*Partial, error) {
	return p.receive(ctx, &Partial{pool: p, v: volume.Volume{ID: volume.ID{Name: name}}, content: content, data: data})
}

func (p *Pool) receive(ctx context.Context, x *Partial) (_ *Partial, err error) {
	if err := p.Check(); err != nil {
		return nil, err
	}
	if (x.v.Directory == nil) != (x.content.Tree == nil) {
		return nil, volume.Errorf(volume.ErrDamaged, "the description of the source of volume %q is not that of its kind", x.v.ID.Name)
	}
	name := x.v.ID.Name
	p.received.begin(name)
	defer func() {
		if err != nil {
			x.Close()
		}
	}()
	had, err := p.readProgress(name)
	if err == nil && !x.continues(had) {
		had = progress{}
		err = x.begin(ctx)
	}
	if err != nil {
		return nil, err
	}
	if !x.sameContent(had) { // other data on storage is overwritten
		had = progress{}
	}
	x.progress = progress{
		Identity: x.content.Identity, Layout: x.content.Layout(), Base: had.Base, Whole: had.Whole,
		Verified: min(had.Verified, x.content.StorageSize()), Bytes: had.Bytes, Made: had.Made,
	}
	if x.Base != "" && x.content.Tree == nil { // blocks of the base follow, which can be shared only from the beginning of a block on
		x.Verified -= x.Verified % baseAlignment
	}
	if err := p.ledger.Reserve(receivedPath(name), x.reservation()); err != nil {
		return nil, err
	}
	if err := x.open(ctx); err != nil {
		err = p.medium.ExplainWrite(err)
		if (x.data != nil || ctx.Err() != nil) && x.Verified > 0 && !errors.Is(err, ErrNotErased) { // the next call continues
			return nil, err
		}
		return nil, errors.Join(err, x.closeImage(), p.DiscardReceived(name))
	}
	return x, nil
}

// sameContent reports whether the progress of an earlier call is that of the same content.
func (x *Partial) sameContent(had progress) bool {
	return had.Identity == x.content.Identity && had.Layout == x.content.Layout()
}

// continues reports whether the image of an earlier call stays, because it was received from the same content. Data on storage
// also stays if it is overwritten with other content: it need not be wiped, and has the identity in the record of the earlier call.
func (x *Partial) continues(had progress) bool {
	same := x.sameContent(had)
	if same && x.content.Tree != nil {
		return x.continuesTree(had)
	}
	if x.data == nil || had.Identity == "" { // without progress, the data may be about to be discarded
		return same
	}
	before, err := x.pool.receivedVolume(x.v.ID.Name)
	if err != nil {
		return false
	}
	v, ok := x.data.Continue(before, same)
	if ok {
		x.v = v
	}
	return ok
}

// begin discards what was received before.
func (x *Partial) begin(ctx context.Context) error {
	if err := x.pool.DiscardReceived(x.v.ID.Name); err != nil || x.data == nil {
		return err
	}
	v, err := x.data.Begin(ctx)
	if err == nil {
		x.v = v
	}
	return err
}

// readProgress reads how much of an image was received. If that is not known, nothing was received.
func (p *Pool) readProgress(name string) (had progress, err error) {
	b, err := p.files.Read(p.dir, receivedPath(name)+"/"+progressFile)
	if beneath.IsNotExist(err) {
		return had, nil
	}
	if err == nil && json.Unmarshal(b, &had) != nil || had.Verified < 0 {
		had = progress{}
	}
	return had, err
}

// open opens the image, and removes from it what was not verified.
func (x *Partial) open(ctx context.Context) error {
	p, path := x.pool, receivedPath(x.v.ID.Name)
	if err := p.root.MkdirAll(path, 0o700); err != nil {
		return err
	}
	var err error
	if x.dir, err = p.root.OpenRoot(path); err != nil {
		return err
	}
	record, err := x.v.MarshalRecord()
	if err != nil {
		return err
	}
	if err := atomicfile.Write(x.dir, recordFile, record); err != nil {
		return err
	}
	switch {
	case x.content.Tree != nil:
		err = x.openTree(ctx)
	case x.data == nil:
		err = x.openImage()
	default:
		err = x.openOnStorage(ctx, record)
	}
	if err == nil {
		x.to, err = x.budget().Writer(x.Image)
	}
	if err != nil {
		return err
	}
	return x.record()
}

// budget returns the budget for writing to Image and to the directory. It is nil if the data has a storage of its own.
func (x *Partial) budget() *background.Budget {
	if x.data != nil && !x.data.SharesDisk() {
		return nil
	}
	return x.pool.Background(x.Image)
}

// openOnStorage opens the data on the storage of the pool. After a power failure the record identifies the data.
func (x *Partial) openOnStorage(ctx context.Context, record []byte) error {
	p := x.pool
	if err := errors.Join(atomicfile.Sync(p.root, receivedDir), atomicfile.Sync(p.root, filepath.Dir(receivedDir))); err != nil {
		return err
	}
	image, kept, err := x.data.Open(ctx, x.dir, x.v, x.Verified)
	if err != nil {
		return err
	}
	if kept < x.Verified {
		x.Bytes = 0
	}
	x.Image, x.Verified, x.written = image, kept, kept
	return completeRecord(x.dir, x.v, record)
}

// openImage opens the image.
func (x *Partial) openImage() (err error) {
	p := x.pool
	x.Image, err = x.dir.OpenFile(ImageFile, p.OpenFlags(os.O_RDWR|unix.O_NOFOLLOW), 0)
	if errors.Is(err, os.ErrNotExist) {
		x.progress = progress{Identity: x.Identity}
		x.Image, err = x.dir.OpenFile(ImageFile, p.OpenFlags(os.O_RDWR|os.O_CREATE|os.O_EXCL), 0o600)
	}
	if err != nil {
		return err
	}
	return x.Image.Truncate(x.Verified)
}

// Bases returns the identities of the contents with which the image or the directory can begin, by sharing blocks. One that has
// begun keeps its base. Data on storage has none.
func (x *Partial) Bases() ([]string, error) {
	switch {
	case x.Base != "":
		return []string{x.Base}, nil
	case x.Verified > 0, x.Whole, x.data != nil:
		return nil, nil
	}
	bases, err := x.pool.Images.unchanged(x.content.Lineage)
	if err != nil || len(bases) == 0 {
		return nil, err
	}
	trial, err := x.pool.UnnamedFile()
	if err != nil {
		return nil, err
	}
	defer trial.Close()
	if err = clone.ShareRest(trial, x.Image, 0); errors.Is(err, clone.ErrNotShared) {
		return nil, nil
	}
	return bases, err
}

// Begin gives the image the size of the content. All bytes that are not verified are those of base, or zeros if base is empty.
// ErrUnavailable if base is lost, and ErrPending if another call has locked its volume. alive is called often while the entries of
// a directory are made, here and in Complete, and in ZeroUpTo.
func (x *Partial) Begin(ctx context.Context, base string, alive func()) error {
	x.alive = alive
	x.each = func() error {
		alive()
		return ctx.Err()
	}
	x.withBase = func(use func(*os.File, volume.Volume) error) error { return x.useBase(ctx, use) }
	var err error
	switch {
	case base != "" && x.content.Tree == nil:
		err = x.share(ctx, base)
	case base == "" && x.Base != "":
		err = volume.Errorf(volume.ErrUnavailable, "the other node no longer has the content %q, from which this transfer sends the differences: retry; the transfer begins again", x.Base)
	}
	notShared := errors.Is(err, clone.ErrNotShared)
	if notShared || errors.Is(err, volume.ErrUnavailable) || errors.Is(err, volume.ErrNotFound) {
		return errors.Join(err, x.restart(notShared))
	}
	if err != nil { // the next call continues
		return err
	}
	x.Base = base
	if err := x.record(); err != nil || x.data != nil {
		return err
	}
	if x.content.Tree != nil {
		return x.beginTree() //nolint:contextcheck // x.each ends it with ctx
	}
	return x.pool.medium.ExplainWrite(x.Image.Truncate(x.content.StorageSize()))
}

// share shares the blocks of the volume with the content base, which no call attaches meanwhile.
func (x *Partial) share(ctx context.Context, base string) error {
	return x.pool.useUnchanged(ctx, x.content.Lineage, base, func(name string) error {
		image, err := x.pool.Images.Open(name, os.O_RDONLY)
		if err != nil {
			return err
		}
		defer image.Close()
		return x.pool.medium.ExplainWrite(clone.ShareRest(x.Image, image, x.Verified))
	})
}

// restart makes the next call begin again. If whole is set, that call uses no base.
func (x *Partial) restart(whole bool) error {
	x.progress = progress{Identity: x.Identity, Layout: x.Layout, Whole: whole}
	return x.record()
}

// record makes the progress durable.
func (x *Partial) record() error {
	b, err := json.Marshal(x.progress)
	if err != nil {
		return err
	}
	return atomicfile.Write(x.dir, progressFile, b)
}

// WriteAt writes content at an offset, within the budget of the disk. Before data on storage is written behind the last write, ZeroUpTo
// is called.
func (x *Partial) WriteAt(ctx context.Context, content []byte, at int64) (int, error) {
	if x.content.Tree != nil {
		return x.writeTree(ctx, content, at)
	}
	n, err := x.to.Budget.WriteAt(ctx, aliveWriter{x.to, x.alive}, content, at)
	x.written = at + int64(n)
	return n, err
}

// aliveWriter calls alive before each piece, because the pieces of other tasks before it can take minutes.
type aliveWriter struct {
	io.WriterAt
	alive func()
}

func (w aliveWriter) WriteAt(piece []byte, at int64) (int, error) {
	w.alive()
	return w.WriterAt.WriteAt(piece, at)
}

// HasGap reports whether ZeroUpTo must zero something.
func (x *Partial) HasGap(offset int64) bool { return x.data != nil && x.written < offset }

// ZeroUpTo makes what was not written before an offset read as zeros. An image and a directory already do.
func (x *Partial) ZeroUpTo(ctx context.Context, offset int64) error {
	if !x.HasGap(offset) {
		return nil
	}
	err := x.data.Zero(ctx, x.to, clone.Range{Offset: x.written, Length: offset - x.written}, x.alive)
	if err == nil {
		x.written = offset
	}
	return err
}

// PunchHole makes a range of the image or the directory read as zeros, and frees its blocks (fallocate(2)). For data on storage,
// ZeroUpTo does that. The index of a directory, and a directory without a base, already do.
func (x *Partial) PunchHole(r clone.Range) error {
	switch {
	case x.data != nil, x.content.Tree != nil && (x.Base == "" || r.Offset < x.content.Tree.IndexSize):
		return nil
	case x.content.Tree != nil:
		return x.punchTree(r)
	}
	return unix.Fallocate(int(x.Image.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, r.Offset, r.Length)
}

// Completes reports whether Complete must be called when the content is complete up to an offset.
func (x *Partial) Completes(upTo int64) bool {
	return x.content.Tree != nil && x.tree == nil && upTo >= x.content.Tree.IndexSize
}

// Complete makes the entries of a directory after its index. bytes is the size of the data before them. No other method may be called
// concurrently.
func (x *Partial) Complete(bytes int64) error {
	if err := x.SetVerified(x.content.Tree.IndexSize, bytes); err != nil {
		return err
	}
	return x.makeTree()
}

// Volume is the record of the new volume.
func (x *Partial) Volume() volume.Volume { return x.v }

// SetVerified makes the image durable, and records that it is complete up to an offset. bytes is the size of the data before it.
// WriteAt may be called meanwhile.
func (x *Partial) SetVerified(upTo, bytes int64) error {
	if err := x.Image.Sync(); err != nil {
		return err
	}
	if x.tree != nil {
		if err := x.tree.Sync(); err != nil {
			return err
		}
	}
	crashpoint.Here(crashpoint.ReceiveSynced)
	x.Verified, x.Bytes = upTo, bytes
	if err := x.record(); err != nil {
		return err
	}
	crashpoint.Here(crashpoint.ReceiveRecorded)
	return nil
}

// Commit makes the volume of the complete image. finish completes the volume's folder, and gives the image its final size. The
// folder becomes that of the volume, so that data on storage always belongs to one record.
func (x *Partial) Commit(ctx context.Context, finish func(dir *os.Root, image *os.File) error) error {
	complete := func(dir *os.Root) error { return finish(dir, x.Image) }
	return x.commit(ctx, complete, func(string) error { return nil })
}

// commit is Commit with a function place, as in Pool.create.
func (x *Partial) commit(ctx context.Context, finish func(dir *os.Root) error, place func(entry string) error) error {
	p, v := x.pool, x.v
	ctx = context.WithoutCancel(ctx)
	path := FolderPath(v.ID.Name)
	defer p.ledger.Begin(path)()
	v.CreationID = uuid.NewString()
	entry, err := p.medium.Entry(v.ID.Name, v.StorageSize(), "")
	if err == nil {
		err = p.building.makeTmp(ctx, entry)
	}
	if err != nil {
		return err
	}
	if err := p.moveReceived(v.ID.Name, entry); err != nil {
		return errors.Join(err, p.building.abandon(ctx, entry, v.ID.Name))
	}
	p.ledger.Rename(receivedPath(v.ID.Name), path)
	err = p.buildAndCommit(ctx, v, entry, func(dir *os.Root) error { return x.complete(dir, finish) }, place)
	if err == nil {
		err = p.SyncVolumes()
	}
	if err != nil {
		p.recount(v.ID.Name)
	}
	return err
}

// moveReceived renames the folder of a volume that was received to an empty entry of tmp.
func (p *Pool) moveReceived(name, entry string) error {
	from, err := beneath.OpenDir(p.dir, receivedDir)
	if err != nil {
		return err
	}
	defer from.Close()
	return beneath.Rename(from, name, p.tmp, entry)
}

// complete completes the folder of the new volume in tmp. On storage, the record in it was already replaced.
func (x *Partial) complete(dir *os.Root, finish func(dir *os.Root) error) error {
	crashpoint.Here(crashpoint.ReceiveMoved)
	err := dir.Remove(progressFile)
	if err == nil && x.data == nil {
		err = dir.Remove(recordFile)
	}
	if err == nil {
		err = finish(dir)
	}
	if err == nil && x.data != nil {
		err = x.closeImage()
	}
	return err
}

// Close closes the image. What was verified stays for the next call.
func (x *Partial) Close() {
	defer x.pool.received.end(x.v.ID.Name)
	if err := x.closeImage(); err != nil {
		klog.ErrorS(err, "Closing the data of an interrupted transfer failed", "volume", x.v.ID)
	}
	if x.dir != nil {
		_ = x.dir.Close()
	}
}

func (x *Partial) closeImage() error {
	if x.tree != nil {
		x.tree.Close()
	}
	if x.directory != nil {
		_ = x.directory.Close()
	}
	if x.to != nil {
		x.to.Close()
	}
	image := x.Image
	x.Image, x.to, x.tree, x.directory = nil, nil, nil, nil
	switch {
	case image == nil:
		return nil
	case x.data == nil:
		return image.Close()
	}
	return x.data.Close(x.v, image)
}

// DiscardReceived removes an image that was not received completely, if there is one. No call may receive it.
func (p *Pool) DiscardReceived(name string) error {
	if p.Shared() {
		return nil
	}
	defer p.received.forget(name)
	return p.discardReceived(name)
}

// discardReceived does the same as DiscardReceived, and leaves the times to the caller.
func (p *Pool) discardReceived(name string) error {
	from, err := beneath.OpenDir(p.dir, receivedDir)
	if err != nil {
		return beneath.IgnoreGone(err)
	}
	defer from.Close()
	if err := p.forgetProgress(from, name); err != nil {
		return err
	}
	onStorage, err := p.building.abandonOnStorage(from, name)
	if err != nil {
		return err
	}
	crashpoint.Here(crashpoint.ReceiveAbandoned)
	entry := name + "." + uuid.NewString()[:8]
	err = beneath.MoveUnique(from, name, p.trash, entry)
	if beneath.IsNotExist(err) {
		p.ledger.Remove(receivedPath(name))
		return nil
	}
	if err != nil {
		return err
	}
	reservation := ledger.Reservation{Backend: ledger.UnknownBackend}
	if _, err := beneath.Stat(p.trash, entry+"/"+DataDir); onStorage || err == nil { // the data takes space until it is reclaimed
		reservation = p.Trash.entryReservation(entry)
	}
	p.ledger.Move(receivedPath(name), trashDir+"/"+entry, reservation)
	p.Trash.reaper.add(entry)
	return errors.Join(from.Sync(), p.trash.Sync())
}

// forgetProgress durably removes the progress of an image, so that no call continues it after abandonOnStorage.
func (p *Pool) forgetProgress(from *os.File, name string) error {
	dir, err := beneath.OpenRoot(from, name)
	if err != nil {
		return beneath.IgnoreGone(err)
	}
	defer dir.Close()
	if err := dir.Remove(progressFile); err != nil {
		return beneath.IgnoreGone(err)
	}
	return atomicfile.Sync(dir, ".")
}

// expireInterval is the time between two searches for images that no call receives any more.
const expireInterval = time.Minute

// expireReceived removes, until ctx ends, the images that no call receives any more.
func (p *Pool) expireReceived(ctx context.Context, log klog.Logger) {
	tick := time.NewTicker(expireInterval)
	defer tick.Stop()
	for {
		if err := p.discardExpired(time.Now()); err != nil {
			log.Error(err, "Removing the images of interrupted transfers failed; it is tried again")
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// discardExpired removes the images that no call has received for receivedLifetime.
func (p *Pool) discardExpired(now time.Time) error {
	names, err := beneath.Names(p.dir, receivedDir)
	if err != nil {
		return beneath.IgnoreGone(err)
	}
	var failed error
	for _, name := range names {
		failed = errors.Join(failed, p.received.ifExpired(name, now, func() error { return p.discardReceived(name) }))
	}
	return failed
}

// receivedVolume reads the record of a volume that is being received.
func (s *store) receivedVolume(name string) (volume.Volume, error) {
	b, err := s.files.Read(s.dir, receivedPath(name)+"/"+recordFile)
	if err != nil {
		return volume.Volume{}, err
	}
	return s.forms.ParseVolume(b)
}

// receivedReservation returns the reservation of a volume that is being received.
func (s *store) receivedReservation(name string) ledger.Reservation {
	v, err := s.receivedVolume(name)
	if err != nil {
		return ledger.Reservation{Backend: ledger.UnknownBackend}
	}
	r := ledger.OfVolume(v)
	if st, err := beneath.Stat(s.dir, receivedPath(name)+"/"+indexFile); err == nil {
		r.Bytes += st.Size
	}
	return r
}

// UnnamedFile makes an empty file in the pool that has no name, and is removed when it is closed.
func (p *Pool) UnnamedFile() (*os.File, error) {
	fd, err := unix.Openat(int(p.tmp.Fd()), ".", unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, p.medium.ExplainWrite(&os.PathError{Op: "openat", Path: tmpDir, Err: err})
	}
	return os.NewFile(uintptr(fd), tmpDir), nil
}
