package driver

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/location"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// defaultMaxVolumes is the default of maxVolumesPerNode.
const defaultMaxVolumes = 4096

// Config is the content of the configuration file.
type Config struct {
	// Pools is nil if the file does not set pools (the default pool is used), and empty if
	// it sets an empty list (no pools).
	Pools []pool.Config `yaml:"pools"`
	// MaxVolumesPerNode is the maximum number of volumes that are published to the node.
	MaxVolumesPerNode int `yaml:"maxVolumesPerNode"`
	// EphemeralMemory is the maximum size of an inline volume in memory. If it is empty, inline
	// volumes in memory are refused.
	EphemeralMemory string `yaml:"ephemeralMemory"`
	// TransferLimit limits the transfers of volumes to and from other nodes.
	TransferLimit TransferLimit `yaml:"transferLimit"`
	// FlexVolume is for the FlexVolume executable; the driver ignores it.
	FlexVolume FlexVolume `yaml:"flexVolume"`
	// Pprof enables Go's profiles at /debug/pprof/.
	Pprof bool `yaml:"pprof"`
	// Forwarding is nil if one driver serves both the controller and the node.
	Forwarding *Forwarding `yaml:"forwarding"`
	// Kubernetes is nil outside Kubernetes.
	Kubernetes *Kubernetes `yaml:"kubernetes"`
}

// FlexVolume configures the FlexVolume executable.
type FlexVolume struct {
	// Endpoint is the `unix:///path` of the running driver. If it is empty, the executable uses its default.
	Endpoint string `yaml:"endpoint"`
}

// Forwarding configures how the controller's driver sends calls to the nodes' drivers.
type Forwarding struct {
	// Listen is the host:port on which a node's driver accepts calls from the controller's
	// driver. It is empty in the configuration of the controller's driver.
	Listen string `yaml:"listen"`
	// Nodes lists the nodes that the controller's driver calls. It is empty if the nodes are
	// read from Kubernetes.
	Nodes []ForwardingNode `yaml:"nodes"`
	// Certificates is the directory of tls.crt, tls.key and ca.crt. If it is empty, the files
	// are in the directory certificates of the state directory.
	Certificates string `yaml:"certificates"`
}

// Controller reports whether this is the configuration of the controller's driver.
func (f *Forwarding) Controller() bool { return f != nil && f.Listen == "" }

// CertificatesDir returns the directory of the driver's own certificate.
func (f *Forwarding) CertificatesDir(stateDir string) string {
	return cmp.Or(f.Certificates, filepath.Join(stateDir, "certificates"))
}

// ForwardingNode is a node whose driver the controller's driver calls.
type ForwardingNode struct {
	Name    string `yaml:"name"`
	Address string `yaml:"address"`
}

// Kubernetes configures the driver in a Kubernetes cluster.
type Kubernetes struct {
	// KubeletDir is the kubelet's directory, at the same path as on the node.
	KubeletDir string `yaml:"kubeletDir"`
	// StartupTaint enables the removal of the node's startup taint once the driver is
	// registered.
	StartupTaint bool `yaml:"startupTaint"`
	// NFS allows mounts of NFS servers that StorageClasses and PersistentVolumes name. The driver's
	// pod must use the host network, because the mounts outlive the pod, and a mount uses the network
	// namespace in which it was made.
	NFS bool `yaml:"nfs"`
	// Authority is the name of both the Secret and the ConfigMap of the certificate authority
	// in the driver's namespace. If it is empty, the driver does not get its certificates from
	// Kubernetes.
	Authority string `yaml:"authority"`
	// NodeService is the headless Service of the nodes' drivers. NodeServiceAccount is the
	// service account of their pods. Only the controller's driver uses them.
	NodeService        string `yaml:"nodeService"`
	NodeServiceAccount string `yaml:"nodeServiceAccount"`
	// PoolOwners is the name of the ConfigMap in the driver's namespace where the controller's
	// driver records the node of each pool.
	PoolOwners string `yaml:"poolOwners"`
	// NodeLossDelay is the time after which the controller's driver releases the claims of a node that does not exist,
	// if their class has onNodeLoss: release. If it is empty, no claims are released.
	NodeLossDelay string `yaml:"nodeLossDelay"`
	// Events enables the events of the driver that serves the controller on claims and their pods.
	Events bool `yaml:"events"`
	// ProtectClaims lets the controller's driver protect the claims of classes with the parameter protect.
	ProtectClaims bool `yaml:"protectClaims"`
}

// minNodeLossDelay leaves the Node object of a node that registers again the time to appear.
const minNodeLossDelay = 10 * time.Second

// events reports whether the driver that serves the controller creates events.
func (c Config) events() bool { return c.Kubernetes != nil && c.Kubernetes.Events }

// nodeLossDelay parses NodeLossDelay. It returns 0 if no claims are released.
func (k *Kubernetes) nodeLossDelay() (time.Duration, error) {
	if k == nil || k.NodeLossDelay == "" {
		return 0, nil
	}
	delay, err := time.ParseDuration(k.NodeLossDelay)
	if err != nil || delay < minNodeLossDelay {
		return 0, volume.Errorf(volume.ErrInvalid, "kubernetes.nodeLossDelay %q: must be a time of at least %v, such as 10m", k.NodeLossDelay, minNodeLossDelay)
	}
	return delay, nil
}

const defaultKubeletDir = "/var/lib/kubelet"

// LoadConfig reads the configuration file. Without a path, or if the file is optional and does not
// exist, the configuration has one directory pool below the state directory. kinds define the
// sections of pools that are neither directories nor exports.
func LoadConfig(path string, optional bool, stateDir string, kinds backend.Kinds) (Config, error) {
	b, err := os.ReadFile(path)
	if path == "" || (optional && errors.Is(err, os.ErrNotExist)) {
		return Config{
			Pools:             []pool.Config{{Name: "default", Directory: pool.Directory{Path: filepath.Join(stateDir, "pools", "default")}}},
			MaxVolumesPerNode: defaultMaxVolumes,
		}, nil
	}
	if err != nil {
		return Config{}, fmt.Errorf("configuration: %w", err)
	}
	c, err := ParseConfig(b, kinds)
	if err != nil {
		return Config{}, fmt.Errorf("configuration %s: %w", path, err)
	}
	return c, nil
}

// ParseConfig parses a configuration and validates it. Unknown keys are errors. All errors are
// ErrInvalid. An error about a key contains the key and its line.
func ParseConfig(b []byte, kinds backend.Kinds) (Config, error) {
	var doc yaml.Node
	if err := yaml.Unmarshal(b, &doc); err != nil {
		return Config{}, volume.Errorf(volume.ErrInvalid, "%s", plainYAMLError(err))
	}
	if err := checkPoolList(&doc); err != nil {
		return Config{}, err
	}
	c := Config{MaxVolumesPerNode: defaultMaxVolumes}
	d := yaml.NewDecoder(bytes.NewReader(b))
	d.KnownFields(true)
	if err := d.Decode(&c); err != nil && !errors.Is(err, io.EOF) {
		return Config{}, volume.Errorf(volume.ErrInvalid, "%s", plainYAMLError(err))
	}
	if c.Kubernetes != nil && c.Kubernetes.KubeletDir == "" {
		c.Kubernetes.KubeletDir = defaultKubeletDir
	}
	if err := c.decodeSections(&doc, kinds); err != nil {
		return Config{}, err
	}
	return c, c.validate(&doc)
}

// checkPoolList returns an error if pools is a map by name, as in the chart's values.
func checkPoolList(doc *yaml.Node) error {
	if len(doc.Content) == 0 {
		return nil
	}
	if at := child(doc.Content[0], "pools"); at != nil && at.Kind == yaml.MappingNode {
		return volume.Errorf(volume.ErrInvalid, "line %d: pools is a map by name, as in the values of the chart: it must be a list of `- name: NAME` with the keys of that pool", at.Line)
	}
	return nil
}

// decodeSections decodes the sections of pools that the kinds of volumes define, such as disks. A
// key that no kind defines is an error.
func (c Config) decodeSections(doc *yaml.Node, kinds backend.Kinds) error {
	for i := range c.Pools {
		p := &c.Pools[i]
		for _, key := range slices.Sorted(maps.Keys(p.Sections)) {
			section := kinds.PoolSection(pool.Kind(key))
			switch {
			case section == nil:
				return volume.Errorf(volume.ErrInvalid, "line %d: field %s is not a key here", keyLine(doc, i, key), key)
			case p.Section != nil:
				return volume.Errorf(volume.ErrInvalid, "line %d: pools[%d] has both %s and %s: remove one", keyLine(doc, i, key), i, p.Section.Kind(), key)
			}
			if err := decodeStrictly(child(child(child(doc.Content[0], "pools"), i), key), section); err != nil {
				return volume.Errorf(volume.ErrInvalid, "%s", plainYAMLError(err))
			}
			p.Section = section
		}
		p.Sections = nil
	}
	return nil
}

// decodeStrictly fails on unknown keys, which yaml.Node.Decode ignores. Line numbers in errors are
// those of the file.
func decodeStrictly(n *yaml.Node, into any) error {
	b, err := yaml.Marshal(n)
	if err != nil {
		return err
	}
	d := yaml.NewDecoder(io.MultiReader(strings.NewReader(strings.Repeat("\n", n.Line-1)), bytes.NewReader(b)))
	d.KnownFields(true)
	return d.Decode(into)
}

// keyLine returns the line of a key of pool i. The value of the key may begin on a later line.
func keyLine(doc *yaml.Node, i int, key string) int {
	at := child(child(doc.Content[0], "pools"), i)
	for j := 0; j+1 < len(at.Content); j += 2 {
		if at.Content[j].Value == key {
			return at.Content[j].Line
		}
	}
	return at.Line
}

// errNoPools is returned if the configuration of a driver that serves a node does not set pools.
var errNoPools = volume.Errorf(volume.ErrInvalid, "pools: at least one is required; use `pools: []` if all volumes are on NFS servers that StorageClasses name")

func (c Config) validate(doc *yaml.Node) error {
	if err := c.Forwarding.validate(doc); err != nil {
		return err
	}
	memory, memoryErr := volume.ParseSize(c.EphemeralMemory)
	_, rateErr := c.TransferLimit.bytesPerSecond()
	_, delayErr := c.Kubernetes.nodeLossDelay()
	var endpointErr error
	if c.FlexVolume.Endpoint != "" {
		_, endpointErr = SocketPath(c.FlexVolume.Endpoint)
	}
	switch k := c.Kubernetes; {
	case c.Pools == nil && c.Forwarding == nil:
		return errNoPools
	case c.MaxVolumesPerNode < 1:
		return volume.Errorf(volume.ErrInvalid, "line %d: maxVolumesPerNode %d: must be 1 or more", lineOf(doc, "maxVolumesPerNode"), c.MaxVolumesPerNode)
	case c.EphemeralMemory != "" && (memoryErr != nil || memory == 0):
		return volume.Errorf(volume.ErrInvalid, "line %d: ephemeralMemory %q: must be the size of the largest inline volume in memory, such as 1Gi", lineOf(doc, "ephemeralMemory"), c.EphemeralMemory)
	case endpointErr != nil:
		return fmt.Errorf("line %d: flexVolume.%w", lineOf(doc, "flexVolume", "endpoint"), endpointErr)
	case rateErr != nil:
		return fmt.Errorf("line %d: %w", lineOf(doc, "transferLimit", "bytesPerSecond"), rateErr)
	case c.TransferLimit.Streams < 0:
		return volume.Errorf(volume.ErrInvalid, "line %d: transferLimit.streams %d: must be 1 or more, or 0 for the default", lineOf(doc, "transferLimit", "streams"), c.TransferLimit.Streams)
	case delayErr != nil:
		return fmt.Errorf("line %d: %w", lineOf(doc, "kubernetes", "nodeLossDelay"), delayErr)
	case k != nil && !filepath.IsAbs(k.KubeletDir):
		return volume.Errorf(volume.ErrInvalid, "line %d: kubernetes.kubeletDir %q: must be an absolute path", lineOf(doc, "kubernetes", "kubeletDir"), k.KubeletDir)
	}
	return c.validatePools(doc)
}

func (c Config) validatePools(doc *yaml.Node) error {
	names, locations := map[string]bool{}, map[string]string{}
	for i, p := range c.Pools {
		if key, err := p.Validate(); err != nil {
			return fmt.Errorf("line %d: pools[%d].%w", poolLine(doc, i, key), i, err)
		}
		if names[p.Name] {
			return volume.Errorf(volume.ErrInvalid, "line %d: pools[%d].name %q: another pool has that name", lineOf(doc, "pools", i, "name"), i, p.Name)
		}
		if err := checkMountOptions(doc, i, p); err != nil {
			return err
		}
		key, at := canonicalLocation(p)
		if other, taken := locations[at]; taken {
			return volume.Errorf(volume.ErrInvalid, "line %d: pools[%d].%s %q: pool %q already has that location, and pool %q would be another name for it: remove one", poolLine(doc, i, key), i, key, at, other, p.Name)
		}
		for _, other := range c.Pools[:i] {
			if key, err := checkOverlap(p, other); err != nil {
				return fmt.Errorf("line %d: pools[%d].%w", poolLine(doc, i, key), i, err)
			}
		}
		names[p.Name], locations[at] = true, p.Name
	}
	return nil
}

// canonicalLocation returns the canonical location of a pool's volumes and the key that sets it. The
// configuration of the pool must be valid.
func canonicalLocation(p pool.Config) (key, at string) {
	if p.Section != nil { // the name of the pool determines the location of its records
		return string(p.Kind()), string(p.Kind()) + " of pool " + p.Name
	}
	if !p.Shared() {
		return "directory.path", filepath.Clean(p.Directory.Path)
	}
	export, _ := volume.CanonicalExport(p.NFS.Export)
	return "nfs.export", mount.NFS{Server: serverOf(p), Path: export}.String()
}

// checkOverlap returns an error if one pool is inside the other, or if both are exports of one server
// and one of them has no size: both may be on one filesystem. key is the key that the error is about.
// Nesting through symbolic links or mounts is detected when the pools are opened.
func checkOverlap(p, other pool.Config) (key string, err error) {
	if p.Section != nil || other.Section != nil || p.Shared() != other.Shared() {
		return "", nil
	}
	key, at := canonicalLocation(p)
	_, otherAt := canonicalLocation(other)
	inner, outer := p.Name, other.Name
	if location.IsBelow(otherAt, at) {
		inner, outer = other.Name, p.Name
	}
	if location.IsBelow(at, otherAt) || location.IsBelow(otherAt, at) {
		return key, volume.Errorf(volume.ErrInvalid, "%s %q: pool %q is inside pool %q: give each pool a directory outside all other pools", key, at, inner, outer)
	}
	if p.Shared() && serverOf(p) == serverOf(other) && (p.Size == "" || other.Size == "") {
		return "nfs", volume.Errorf(volume.ErrInvalid, "size: pools %q and %q are exports of server %s, and a driver cannot detect whether they are on one filesystem: give both a size whose sum does not exceed that filesystem", other.Name, p.Name, serverOf(p))
	}
	return "", nil
}

func serverOf(p pool.Config) string {
	server, _ := volume.CanonicalServer(p.NFS.Server) // validated before
	return server
}

// checkMountOptions returns an error for mount options that are not allowed for an export.
func checkMountOptions(doc *yaml.Node, i int, p pool.Config) error {
	if !p.Shared() {
		return nil
	}
	for j, option := range p.NFS.MountOptions {
		if err := mount.CheckNFSOptions([]string{option}); err != nil {
			return volume.Errorf(volume.ErrInvalid, "line %d: pools[%d].nfs.mountOptions[%d]: %w", lineOf(doc, "pools", i, "nfs", "mountOptions", j), i, j, err)
		}
	}
	if err := mount.CheckNFSOptions(p.NFS.MountOptions); err != nil {
		return volume.Errorf(volume.ErrInvalid, "line %d: pools[%d].nfs.mountOptions: %w", lineOf(doc, "pools", i, "nfs", "mountOptions"), i, err)
	}
	return nil
}

func (f *Forwarding) validate(doc *yaml.Node) error {
	switch {
	case f == nil:
		return nil
	case f.Listen != "" && !validAddress(f.Listen):
		return volume.Errorf(volume.ErrInvalid, "line %d: forwarding.listen %q: must be host:port, or :port for all addresses", lineOf(doc, "forwarding", "listen"), f.Listen)
	case f.Certificates != "" && !filepath.IsAbs(f.Certificates):
		return volume.Errorf(volume.ErrInvalid, "line %d: forwarding.certificates %q: must be an absolute path", lineOf(doc, "forwarding", "certificates"), f.Certificates)
	}
	names := map[string]bool{}
	for i, n := range f.Nodes {
		line := func(key string) int { return lineOf(doc, "forwarding", "nodes", i, key) }
		switch host, _, _ := net.SplitHostPort(n.Address); {
		case n.Name == "" || len(n.Name) > maxNodeID:
			return volume.Errorf(volume.ErrInvalid, "line %d: forwarding.nodes[%d].name %q: must be the --node-id of the node's driver, of at most %d bytes", line("name"), i, n.Name, maxNodeID)
		case names[n.Name]:
			return volume.Errorf(volume.ErrInvalid, "line %d: forwarding.nodes[%d].name %q: another node has that name", line("name"), i, n.Name)
		case host == "" || !validAddress(n.Address):
			return volume.Errorf(volume.ErrInvalid, "line %d: forwarding.nodes[%d].address %q: must be host:port", line("address"), i, n.Address)
		}
		names[n.Name] = true
	}
	return nil
}

// validAddress reports whether an address is host:port with a port from 1 to 65535. The host may be empty.
func validAddress(address string) bool {
	_, port, err := net.SplitHostPort(address)
	if err != nil {
		return false
	}
	n, err := strconv.ParseUint(port, 10, 16)
	return err == nil && n > 0
}

// poolLine returns the line of a value in pool i, such as that of nfs.export.
func poolLine(doc *yaml.Node, i int, key string) int {
	path := []any{"pools", i}
	for part := range strings.SplitSeq(key, ".") {
		path = append(path, part)
	}
	return lineOf(doc, path...)
}

// lineOf returns the line of the node at a path of keys and indices, or of its nearest ancestor
// that exists.
func lineOf(doc *yaml.Node, path ...any) int {
	if len(doc.Content) == 0 {
		return 0
	}
	at := doc.Content[0]
	for _, step := range path {
		next := child(at, step)
		if next == nil {
			break
		}
		at = next
	}
	return at.Line
}

// child returns the value of a key (a string) in a mapping, or the item with an index (an int) in a sequence. It
// returns nil if the value does not exist.
func child(at *yaml.Node, step any) *yaml.Node {
	if i, ok := step.(int); ok {
		if at.Kind == yaml.SequenceNode && i < len(at.Content) {
			return at.Content[i]
		}
		return nil
	}
	for i := 0; at.Kind == yaml.MappingNode && i+1 < len(at.Content); i += 2 {
		if at.Content[i].Value == step {
			return at.Content[i+1]
		}
	}
	return nil
}

var goType = regexp.MustCompile(` (in|not found in) type \S+`)

// plainYAMLError removes the names of Go types from an error of the decoder.
func plainYAMLError(err error) string {
	text := strings.TrimPrefix(err.Error(), "yaml: ")
	text = strings.TrimPrefix(text, "unmarshal errors:\n")
	text = goType.ReplaceAllString(text, " is not a key here")
	return strings.Join(strings.Fields(text), " ")
}
