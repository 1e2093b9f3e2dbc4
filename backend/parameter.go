package backend

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/trivet-csi/trivet/volume"
)

// Parameter is a parameter of a StorageClass.
type Parameter struct {
	Key string
	// Values are all valid values. If it is nil, Valid checks a value, and Want describes the valid
	// values.
	Values []string
	Valid  func(value string) bool
	Want   string
	// Default is the value if the class does not set the parameter. If it is empty, Doc describes
	// the default.
	Default string
	// Doc is one line for docs/reference/parameters.md.
	Doc string
}

// check refuses an invalid value.
func (p Parameter) check(value string) error {
	if p.Values == nil && p.Valid(value) || slices.Contains(p.Values, value) {
		return nil
	}
	return volume.Errorf(volume.ErrInvalid, "parameter %s=%.80q: expected %s%s", p.Key, value, p.want(), didYouMean(value, p.Values))
}

// want describes the valid values.
func (p Parameter) want() string {
	if p.Values != nil {
		return either(p.Values)
	}
	return p.Want
}

// either joins at least two words with commas and "or".
func either(words []string) string {
	last := len(words) - 1
	return strings.Join(words[:last], ", ") + " or " + words[last]
}

// commonParameters are the documented parameters that every kind has.
var commonParameters = []Parameter{
	{
		Key: volume.ParamBackend, Valid: anything, Want: "the name of a backend",
		Doc: "The kind of volume.",
	},
	{
		Key: volume.ParamPool, Valid: volume.ValidPoolName, Want: "the name of a pool: 1 to 40 of a-z, 0-9 and -",
		Doc: "Default: the first pool that the backend can use, in the order of the configuration. The chart writes `default` first, then the others by name.",
	},
}

// nodeLoss is a parameter of every kind whose volumes can be in pools of nodes.
var nodeLoss = Parameter{
	Key: volume.ParamOnNodeLoss, Values: []string{volume.NodeLossKeep, volume.NodeLossRelease}, Default: volume.NodeLossKeep,
	Doc: "What happens to the claim of a volume in a pool of a node when the Node object does not exist any more: `release` [deletes it](../operations/nodes.md#release-the-claims-of-lost-nodes) and its PersistentVolume, if `controller.nodeLoss.enabled` of the chart is set.",
}

// ioLimits are parameters of every kind that implements IOLimiter, with the initial limits of a volume.
var ioLimits = ioLimitParameters()

func ioLimitParameters() (all []Parameter) {
	for _, l := range volume.IOLimitParameters {
		all = append(all, Parameter{
			Key: l.Key, Valid: l.Valid, Want: l.Want(),
			Doc: "The initial [limit](../operations/limits.md) of each pod's " + l.Doc + ", in pools of nodes. Default: `" + volume.NoIOLimit + "`, no limit.",
		})
	}
	return all
}

// namespaceParameter is a parameter of every kind. It is not documented, because only FlexVolume sets
// it.
var namespaceParameter = Parameter{Key: volume.ParamNamespace, Valid: volume.ValidNamespace, Want: "a namespace: 1 to 63 of a-z, 0-9 and -"}

// exportParameters specify an export in place of a pool (parseExport).
var exportParameters = []Parameter{
	{
		Key: volume.ParamServer, Valid: anything, Want: "a name or an address",
		Doc: "The server of an export that is not a pool, in place of `pool`.",
	},
	{
		Key: volume.ParamShare, Valid: anything, Want: "an absolute path",
		Doc: "The path of that export.",
	},
	{Key: volume.ParamExport, Valid: anything, Want: "an absolute path", Doc: "Another name of `share`."},
}

// FSType and MkfsOptions are parameters of every kind whose volumes have a device.
var (
	FSType = Parameter{
		Key: volume.ParamFSType, Valid: func(value string) bool { return value == "" || volume.ValidFSType(value) }, Want: either(volume.FSTypes),
		Doc: "The filesystem. Default: `" + volume.FSTypes[0] + "`.",
	}
	MkfsOptions = Parameter{
		Key: volume.ParamMkfsOptions, Valid: anything, Want: "words of [this list](#mkfsoptions)",
		Doc: "Options of mkfs, which runs when the volume is first staged.",
	}
)

// Copies is a parameter of every kind that implements Transferrer.
var Copies = Parameter{
	Key: volume.ParamCopies, Values: []string{volume.CopiesAnywhere, volume.CopiesLocal}, Default: volume.CopiesAnywhere,
	Doc: "Where a volume from a snapshot or another volume is created: `anywhere` on the node of the pod, to which the data is [sent](../snapshots.md#restore-on-another-node), `local` on the node of the source.",
}

// Transfer reports whether volumes of the kind with a name can be sent to another node.
func (ks Kinds) Transfer(name string) bool {
	return slices.Contains(ks.withParameter(volume.ParamCopies), name)
}

// Protect is a parameter of the kinds whose volumes can be sent to another node, and have snapshots while they are in use. A kind
// refuses it for pools without snapshots.
var Protect = Parameter{
	Key: volume.ParamProtect, Values: volume.CopyPeriods,
	Doc: "The time between two copies of the volume on another node, for each claim of the class: see [copies on another node](../operations/protection.md#protect-all-claims-of-a-class). Needs `protection.enabled` of the chart. Default: no copies.",
}

// checkProtect refuses a protection by parameters with which no copy could be made or used.
func checkProtect(p volume.Parameters) error {
	if p.Get(volume.ParamProtect) == "" {
		return nil
	}
	for key, value := range map[string]string{volume.ParamCopies: volume.CopiesLocal, volume.ParamOnNodeLoss: volume.NodeLossRelease} {
		if p.Get(key) == value {
			return volume.Errorf(volume.ErrInvalid, "parameters %s=%q and %s=%q: copies on another node are impossible or of no use with both: remove one", volume.ParamProtect, p.Get(volume.ParamProtect), key, value)
		}
	}
	return nil
}

// anything accepts every value. It is for parameters that are checked later, together with others.
func anything(string) bool { return true }

// Parse parses StorageClass parameters. The error (ErrInvalid) names the key, the value, and the
// allowed values.
func (ks Kinds) Parse(class map[string]string) (volume.Parameters, error) {
	k, err := ks.kindOf(class)
	if err != nil {
		return volume.Parameters{}, err
	}
	out := volume.Parameters{Backend: k.Name, Pool: class[volume.ParamPool], Namespace: class[volume.ParamNamespace], Values: map[string]string{}}
	for _, p := range k.Parameters {
		if p.Default != "" {
			out.Values[p.Key] = p.Default
		}
	}
	for _, key := range slices.Sorted(maps.Keys(class)) {
		value := class[key]
		switch p, known := k.parameter(key); {
		case known:
			err = p.check(value)
		// Other keys of the provisioner are ignored, except a filesystem that the kind does not have.
		case !strings.HasPrefix(key, volume.ProvisionerPrefix) || key == volume.ParamFSType && value != "" && !slices.Contains(k.FSTypes, value):
			err = ks.refuseParameter(k, key, value)
		}
		if err != nil {
			return volume.Parameters{}, err
		}
		out.Values[key] = value
	}
	if err := cmp.Or(parseExport(&out, class), checkProtect(out)); err != nil {
		return volume.Parameters{}, err
	}
	if k.Check != nil {
		err = k.Check(out)
	}
	return out, err
}

// kindOf returns the kind of a class. A class that was written for csi-driver-nfs specifies an export
// and no backend. Its kind is the first whose volumes only exports can contain.
func (ks Kinds) kindOf(class map[string]string) (Kind, error) {
	name, given := class[volume.ParamBackend]
	if given || len(ks) == 0 {
		return ks.Named(name)
	}
	i := 0
	if class[volume.ParamServer]+class[volume.ParamShare]+class[volume.ParamExport] != "" {
		i = max(0, slices.IndexFunc(ks, Kind.OnlyOnExports))
	}
	return ks[i], nil
}

// withParameter returns the names of the kinds that have a parameter.
func (ks Kinds) withParameter(key string) (names []string) {
	for _, k := range ks {
		if _, ok := k.parameter(key); ok {
			names = append(names, k.Name)
		}
	}
	return names
}

// refuseParameter returns an error (ErrInvalid) for a parameter that the kind does not have, or nil if
// the value is empty and another kind has the parameter.
func (ks Kinds) refuseParameter(k Kind, key, value string) error {
	var known []string
	for _, p := range k.Takes() {
		known = append(known, p.Key)
	}
	takes := fmt.Sprintf("backend %s takes %s", k.Name, strings.Join(known, ", "))
	others := ks.withParameter(key)
	switch {
	case others == nil:
		return volume.Errorf(volume.ErrInvalid, "parameter %s=%.80q is unknown: %s%s", printable(key), value, takes, didYouMean(key, known))
	case value == "":
		return nil
	}
	return volume.Errorf(volume.ErrInvalid, "parameter %s=%.80q belongs to backend %s, and the class has backend %s: remove %[1]s or change the backend; %[5]s", key, value, strings.Join(others, " and "), k.Name, takes)
}

// printable returns a key for an error message, quoted unless it is a plain word.
func printable(key string) string {
	if quoted := fmt.Sprintf("%.80q", key); quoted != `"`+key+`"` || strings.Contains(key, " ") || key == "" {
		return quoted
	}
	return key
}

// parseExport sets p.Pool to the direct pool (volume.DirectPool) of server and share, if the class has
// them.
func parseExport(p *volume.Parameters, class map[string]string) error {
	server := class[volume.ParamServer]
	share, err := volume.Share(class)
	switch {
	case err != nil:
		return fmt.Errorf("parameters %w", err)
	case server == "" && share == "":
		return nil
	case server == "" || share == "":
		return volume.Errorf(volume.ErrInvalid, "parameters %s=%q, %s=%q: give both, or neither and a %s", volume.ParamServer, server, volume.ParamShare, share, volume.ParamPool)
	case p.Pool != "":
		return volume.Errorf(volume.ErrInvalid, "parameters %s=%q and %s=%q: both specify the location of the volume: remove one", volume.ParamPool, p.Pool, volume.ParamServer, server)
	}
	p.Pool, err = volume.DirectPool(server, share)
	return err
}
