package mount

import (
	"fmt"
	"slices"
	"strings"

	"github.com/trivet-csi/trivet/internal/mountflags"
)

// nfsOptions are the mount flags of an NFS mount, without the version.
type nfsOptions struct {
	Options
	// versions are the versions to try, in this order.
	versions []string
}

// notForNFS maps each option that CheckNFSOptions refuses to the reason.
var notForNFS = map[string]string{
	"addr":        setByDriver,
	"clientaddr":  setByDriver,
	"mountaddr":   setByDriver,
	"mounthost":   setByDriver,
	"sharecache":  "each volume has its own mount (nosharecache), so that each can be unmounted without the others",
	"bg":          forMountNFS,
	"fg":          forMountNFS,
	"retry":       forMountNFS,
	"mountprog":   forMountNFS,
	"nfsprog":     forMountNFS,
	"migration":   forMountNFS,
	"nomigration": forMountNFS,
}

const (
	setByDriver = "the driver sets it"
	forMountNFS = "it is an option of mount.nfs(8), a program that the driver does not run"
)

// The options of the authentication and of the encryption of an NFS connection (nfs(5)).
const (
	optionSecurity = "sec"
	optionTLS      = "xprtsec"
)

// securities and tlsPolicies are the values that the driver accepts for these options.
var (
	securities  = []string{"none", "sys", "krb5", "krb5i", "krb5p"}
	tlsPolicies = []string{"none", "tls", "mtls"}
)

// checkValue refuses a value of sec=, which may be a list, or of xprtsec=. The kernel would not name the allowed values.
func checkValue(word string) error {
	key, value, _ := strings.Cut(word, "=")
	var given, allowed []string
	switch key {
	case optionSecurity:
		given, allowed = strings.Split(value, ":"), securities
	case optionTLS:
		given, allowed = []string{value}, tlsPolicies
	}
	for _, g := range given {
		if !slices.Contains(allowed, g) {
			return badNFSOption(word, "give one of "+strings.Join(allowed, ", "))
		}
	}
	return nil
}

// badNFSOption returns the error for a word that is not accepted.
func badNFSOption(word, reason string) error {
	return &Error{Op: "checking NFS mount option " + word, FSType: "nfs", Err: fmt.Errorf("%w: %s", ErrBadOption, reason)}
}

// parseNFSOptions separates mount flags and the version.
func parseNFSOptions(flags []string) (nfsOptions, error) {
	parsed, err := ParseFlags(flags)
	if err != nil {
		return nfsOptions{}, err
	}
	o := nfsOptions{Options: Options{Attr: parsed.Attr, Context: parsed.Context}}
	var major, minor string
	for _, word := range parsed.Data {
		key, _, _ := strings.Cut(word, "=")
		if reason, ok := notForNFS[key]; ok {
			return nfsOptions{}, badNFSOption(word, reason)
		}
		if err := checkValue(word); err != nil {
			return nfsOptions{}, err
		}
		value, isMinor, ok := versionIn(word)
		if !ok {
			o.Data = append(o.Data, word)
			continue
		}
		target := &major
		if isMinor {
			target = &minor
		}
		if value == "" || *target != "" && *target != value {
			return nfsOptions{}, badNFSOption(word, "give one version, such as nfsvers=4.2")
		}
		*target = value
	}
	o.versions, err = nfsVersions(major, minor)
	return o, err
}

// versionIn parses a word that sets the version, such as vers=4.2, v4.2 or minorversion=2. minor means that value is
// only the minor version. ok is false for any other word.
func versionIn(word string) (value string, minor, ok bool) {
	key, value, _ := strings.Cut(word, "=")
	switch {
	case key == "vers" || key == "nfsvers":
		return value, false, true
	case word == "v2" || word == "v3" || word == "v4" || strings.HasPrefix(word, "v4."):
		return word[1:], false, true
	}
	return value, true, key == "minorversion"
}

// With adds mount flags. A version, a value of sec= and an SELinux context in flags replace those in n.Options. Values of
// sec= are not combined, because the kernel uses the first one that the server accepts, even if a later one protects more.
func (n NFS) With(flags []string) NFS {
	words, added := mountflags.Split(n.Options), mountflags.Split(flags)
	for _, replaced := range []func(word string) bool{IsNFSVersion, isSecurity, mountflags.IsContext} {
		if slices.ContainsFunc(added, replaced) {
			words = slices.DeleteFunc(words, replaced)
		}
	}
	n.Options = slices.Concat(words, added)
	return n
}

// IsNFSVersion reports whether a mount option sets the version of NFS.
func IsNFSVersion(word string) bool {
	_, _, ok := versionIn(word)
	return ok
}

func isSecurity(word string) bool { return strings.HasPrefix(word, optionSecurity+"=") }

// nfsVersions returns the versions to try for the values of vers= and minorversion=, which may be empty.
func nfsVersions(major, minor string) ([]string, error) {
	all := []string{"4.2", "4.1", "4.0", "3"}
	if minor != "" {
		if major != "" && major != "4" && major != "4."+minor {
			return nil, badNFSOption("minorversion="+minor, "it contradicts vers="+major)
		}
		major = "4." + minor
	}
	switch {
	case major == "":
		return all, nil
	case major == "4":
		return all[:3], nil
	case slices.Contains(all, major):
		return []string{major}, nil
	default:
		return nil, badNFSOption("nfsvers="+major, "give 3, 4, 4.0, 4.1 or 4.2")
	}
}

// value returns the value of the last option `key=value`, or "" if the key is not set.
func (o nfsOptions) value(key string) string {
	for _, word := range slices.Backward(o.Data) {
		if k, v, ok := strings.Cut(word, "="); ok && k == key {
			return v
		}
	}
	return ""
}

// uses reports whether a value of sec= begins with a text, such as krb5 for all kinds of Kerberos.
func (o nfsOptions) uses(security string) bool {
	return slices.ContainsFunc(o.Data, func(word string) bool { return isSecurity(word) && strings.Contains(word, security) })
}

// proto returns the protocol that the options set, or "". The last option applies.
func (o nfsOptions) proto() string {
	for _, word := range slices.Backward(o.Data) {
		if proto := protoOf(word); proto != "" {
			return proto
		}
	}
	return ""
}

// locksThroughServer reports whether NFS version 3 would request locks (fcntl(2) or flock(2)) from the server,
// which needs rpc.statd.
func (o nfsOptions) locksThroughServer() bool {
	locks := true
	for _, word := range o.Data {
		switch word {
		case "nolock", "local_lock=all":
			locks = false
		case "lock", "local_lock=none", "local_lock=flock", "local_lock=posix":
			locks = true
		}
	}
	return locks
}
