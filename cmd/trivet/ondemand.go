package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/flexvolume"
	"github.com/trivet-csi/trivet/internal/reexec"
	"github.com/trivet-csi/trivet/pool"
)

const (
	// onDemandCommand is the command of the driver that a FlexVolume call starts. It is not in the
	// command tree.
	onDemandCommand = "flexvolume-driver"
	// onDemandIdle is how long the on-demand driver runs without a connection before it ends.
	onDemandIdle = 3 * time.Second
	// onDemandLog is the size of the log in bytes above which a starting on-demand driver truncates it.
	onDemandLog = 1 << 20
	// onDemandDir is the path of the state directory, which the on-demand driver inherits as file
	// descriptor 3. It keeps the path of the socket short, even if the path of the directory is long.
	onDemandDir   = "/proc/self/fd/3"
	onDemandDirFD = 3
)

// onDemandDriver describes the on-demand driver for a configuration. Executables with equal
// configurations share it.
func onDemandDriver(config, stateDir, endpoint string, pools []pool.Config) (d flexvolume.OnDemand, err error) {
	b, err := json.Marshal([]any{endpoint, pools})
	if err != nil {
		return d, err
	}
	sum := sha256.Sum256(b)
	d.Socket = "driver-" + hex.EncodeToString(sum[:8]) + ".sock"
	d.Command = []string{reexec.Self, onDemandCommand, "--config", config, "--state-dir", stateDir, "--endpoint", endpoint, "--socket", d.Socket}
	d.Pools = driver.PoolNames(pools)
	return d, nil
}

// runOnDemandDriver serves CSI for those pools of the configuration that the driver at the endpoint does
// not serve. It ends when it is idle, or when the driver at the endpoint serves other ones of these pools.
func runOnDemandDriver(args []string) error {
	flags := pflag.NewFlagSet(onDemandCommand, pflag.ContinueOnError)
	path, stateDir := flags.String("config", "", ""), flags.String("state-dir", "", "")
	endpoint, socket := flags.String("endpoint", "", ""), flags.String("socket", "", "")
	if err := flags.Parse(args); err != nil || *socket == "" {
		return errors.Join(errors.New("this command is for this program's own use"), err)
	}
	syscall.CloseOnExec(onDemandDirFD) // programs that the driver runs do not need the state directory
	lock, err := lockOnDemand(*stateDir, *socket)
	if err != nil || lock == nil {
		return err
	}
	defer lock.Close()
	if err := logOnDemand(*stateDir); err != nil {
		return err
	}
	config, err := loadFlexvolumeConfig(*path, *stateDir)
	if err != nil {
		return err
	}
	running, err := driver.SocketPath(*endpoint)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	names := driver.PoolNames(config.Pools)
	served, err := flexvolume.PoolsServed(ctx, running, names)
	if err != nil { // calls without a pool can still be served
		klog.FromContext(ctx).Error(err, "Failed to query the pools of the running driver")
	}
	config.Pools = slices.DeleteFunc(config.Pools, func(p pool.Config) bool { return slices.Contains(served, p.Name) })
	o := driver.Options{
		Version: version, Kinds: kinds, Name: driver.DefaultName, NodeID: "flexvolume", StateDir: *stateDir,
		Endpoint: "unix://" + filepath.Join(onDemandDir, *socket), Services: []string{"controller", "node"},
		Config:   driver.Config{Pools: config.Pools, MaxVolumesPerNode: config.MaxVolumesPerNode},
		Worker:   reexec.Self,
		IdleTime: onDemandIdle,
	}
	defer klog.Flush()
	go func() {
		defer stop()
		flexvolume.AwaitChange(ctx, running, names, served)
	}()
	return driver.Run(ctx, o)
}

// lockOnDemand acquires the lock of an on-demand driver until the process ends. It returns nil if another
// process holds the lock.
func lockOnDemand(stateDir, socket string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(stateDir, socket+".lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if err == nil {
		return f, nil
	}
	f.Close()
	if errors.Is(err, syscall.EWOULDBLOCK) {
		return nil, nil //nolint:nilnil // another process has the lock
	}
	return nil, err
}

// logOnDemand sends the log to a file, because the process outlives the call that started it. It also changes
// the working directory to /, because that of the call may be on a filesystem that must be unmounted.
func logOnDemand(stateDir string) error {
	path := filepath.Join(stateDir, flexvolume.LogFile)
	mode := os.O_WRONLY | os.O_CREATE | os.O_APPEND
	if info, err := os.Stat(path); err == nil && info.Size() > onDemandLog {
		mode |= os.O_TRUNC
	}
	f, err := os.OpenFile(path, mode, 0o600)
	if err != nil {
		return err
	}
	os.Stderr = f
	return os.Chdir("/")
}
