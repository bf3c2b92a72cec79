"""The robots' tables against stored numbers of public models, their gains, and models that a user brings."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import numpy as np
import pytest

mujoco = pytest.importorskip("mujoco")

from functional_sl.sim.robots import g1, go2  # noqa: E402
from functional_sl.sim.robots import robot as robots  # noqa: E402

# Positions of bodies of the public MJCF models with the base at (0, 0, 1) and joint i at 0.1 (i mod 5 - 2).
PLACES = {
    "g1": {
        "left_ankle_roll_link": (0.094034, 0.058015, 0.254057),
        "right_ankle_roll_link": (0.00652, -0.137583, 0.246719),
        "torso_link": (-0.003964, 0.0, 1.044),
        "left_wrist_yaw_link": (0.246507, 0.110516, 1.090204),
        "right_wrist_yaw_link": (0.208811, -0.098328, 1.085016),
    },
    "go2": {
        "FL_foot": (0.233939, 0.055846, 0.565409),
        "FR_foot": (0.149083, -0.099418, 0.570819),
        "RL_foot": (-0.216655, 0.09912, 0.567852),
        "RR_foot": (-0.090048, -0.058079, 0.576424),
    },
}
CENTRES = {"g1": (0.050788, -0.012752, 0.911279), "go2": (0.010131, -0.000051, 0.961654)}
ROBOTS = {"g1": g1.robot, "go2": go2.robot}


def bent(robot: robots.Robot) -> tuple[mujoco.MjModel, mujoco.MjData]:
    model = robots.compiled(robot)
    data = mujoco.MjData(model)
    data.qpos[:7] = (0, 0, 1, 1, 0, 0, 0)
    data.qpos[7:] = [0.1 * (i % 5 - 2) for i in range(len(robot.joint_names))]
    mujoco.mj_kinematics(model, data)
    mujoco.mj_comPos(model, data)
    return model, data


def place(robot: robots.Robot, data: mujoco.MjData, name: str) -> np.ndarray:
    frame = robot.frames.get(name, robots.Frame(name, (0.0, 0.0, 0.0)))
    body = data.body(frame.body)
    return body.xpos + body.xmat.reshape(3, 3) @ frame.pos


@pytest.mark.parametrize("name", ROBOTS)
@pytest.mark.parametrize("geometry", ["cheap", "full"])
def test_links_lie_where_the_public_model_has_them(name: str, geometry: str) -> None:
    robot = ROBOTS[name](geometry)
    _, data = bent(robot)
    for body, expected in PLACES[name].items():
        np.testing.assert_allclose(place(robot, data, body), expected, atol=2e-6)
    np.testing.assert_allclose(data.subtree_com[0], CENTRES[name], atol=2e-6)


def test_masses_joints_and_limits() -> None:
    model = robots.facts(g1.robot())
    assert round(model.mass, 2) == 33.34
    assert (len(model.joint_names), len(model.body_names)) == (29, 30)
    assert model.joint_range[model.joints("left_knee_joint")[0]].tolist() == pytest.approx([-0.087267, 2.8798])
    dog = robots.facts(go2.robot())
    assert round(dog.mass, 3) == 15.206
    assert dog.joint_names[:4] == ("FL_hip_joint", "FL_thigh_joint", "FL_calf_joint", "FR_hip_joint")


@pytest.mark.parametrize(
    ("joint", "kp", "kd", "effort", "armature"),
    [
        ("left_hip_pitch_joint", 40.179, 2.558, 88, 0.01018),
        ("right_knee_joint", 99.098, 6.309, 139, 0.02510),
        ("waist_roll_joint", 28.501, 1.814, 50, 0.00722),
        ("left_elbow_joint", 14.251, 0.907, 25, 0.00361),
        ("right_wrist_yaw_joint", 16.778, 1.068, 5, 0.00425),
    ],
)
def test_the_g1s_gains(joint: str, kp: float, kd: float, effort: float, armature: float) -> None:
    for dynamics, inertia, friction in (("unilab", 0.01, 0.3), ("beyondmimic", armature, 0.0)):
        model = robots.compiled(g1.robot(dynamics=dynamics))
        actuator, dof = model.actuator(joint), model.joint(joint).dofadr[0]
        assert actuator.gainprm[0] == pytest.approx(kp, abs=1e-3)
        assert -actuator.biasprm[1:3] == pytest.approx([kp, kd], abs=1e-3)
        assert actuator.forcerange.tolist() == [-effort, effort]
        assert model.dof_armature[dof] == pytest.approx(inertia, abs=1e-5)
        assert model.dof_frictionloss[dof] == friction


@pytest.mark.parametrize("dynamics", g1.DYNAMICS)
def test_both_dynamics_take_control_steps_of_a_fiftieth_of_a_second(dynamics: str) -> None:
    assert robots.facts(g1.robot(dynamics=dynamics)).control_dt == pytest.approx(0.02)
    assert robots.facts(go2.robot()).control_dt == pytest.approx(0.02)


@pytest.mark.parametrize("name", ROBOTS)
def test_the_standing_pose_touches_the_floor_with_the_feet_alone(name: str) -> None:
    robot = ROBOTS[name]()
    model = robots.compiled(robot)
    data = mujoco.MjData(model)
    data.qpos[:] = robot.default_qpos
    mujoco.mj_forward(model, data)
    touching = {model.body(model.geom_bodyid[max(contact.geom)]).name for contact in data.contact}
    feet = {"g1": {"left_ankle_roll_link", "right_ankle_roll_link"}, "go2": {f"{leg}_calf" for leg in go2.LEGS}}
    assert touching
    assert touching <= feet[name]
    assert min(contact.dist for contact in data.contact) > -0.005


def test_only_the_full_g1_meets_itself() -> None:
    for geometry in g1.GEOMETRIES:
        model = robots.compiled(g1.robot(geometry))
        data = mujoco.MjData(model)
        data.qpos[:] = g1.robot(geometry).default_qpos
        data.qpos[2] = 2.0
        for side in (0, 1):  # both legs swing inward
            data.qpos[7 + 6 * side + 1] = (-0.5, 0.5)[side]
        mujoco.mj_forward(model, data)
        assert (data.ncon > 0) == (geometry == "full")


def test_an_unknown_variant_is_named() -> None:
    with pytest.raises(ValueError, match="geometry='fine': the g1 has cheap and full"):
        g1.robot("fine")
    with pytest.raises(ValueError, match="dynamics='isaac': the g1 has unilab and beyondmimic"):
        g1.robot(dynamics="isaac")
    with pytest.raises(ValueError, match="geometry='fine': the go2 has"):
        go2.robot("fine")


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_users_model_takes_the_place_of_links_and_shapes(tmp_path: Path) -> None:
    own = go2.robot()
    text = own.spec.to_xml()
    path = written(tmp_path / "mine.xml", text.replace('mass="6.921"', 'mass="7.921"'))
    robot = go2.robot(xml_path=path)
    assert robots.facts(robot).mass == pytest.approx(robots.facts(own).mass + 1.0)
    model = robots.compiled(robot)
    assert (model.nu, model.nsensor) == (12, len(robot.contact_bodies))
    assert robot.contact_bodies == own.contact_bodies


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"FR_hip_joint"', '"front_right"', "hinge 4 is 'front_right', go2 has 'FR_hip_joint' there"),
        ('body name="RL_calf"', 'body name="RL_shank"', "has no body 'RL_calf'"),
        ('type="free"', 'type="ball"', "first joint of go2 must be free"),
        ("<mujoco", "<robocup", "cannot be read"),
    ],
)
def test_another_robot_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    robot = go2.robot()
    for element in (*robot.spec.actuators, *robot.spec.sensors):
        robot.spec.delete(element)
    robot.spec.compile()
    text = robot.spec.to_xml()
    assert old in text
    with pytest.raises(ValueError, match=message):
        go2.robot(xml_path=written(tmp_path / "other.xml", text.replace(old, new)))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.xml does not exist"):
        g1.robot(xml_path=tmp_path / "nowhere.xml")


def public_g1() -> Path | None:
    """Returns a G1 that the user names by `G1_XML`, or that an installed `mjlab` brings."""
    if "G1_XML" in os.environ:
        return Path(os.environ["G1_XML"])
    found = importlib.util.find_spec("mjlab")
    path = found and Path(found.origin).parent / "asset_zoo/robots/unitree_g1/xmls/g1.xml"
    return path if path and path.is_file() else None


@pytest.mark.skipif(public_g1() is None, reason="no public G1 model: set G1_XML")
def test_the_table_is_the_public_g1() -> None:
    ours, theirs = g1.robot(), g1.robot(xml_path=public_g1())
    (model, data), (other, expected) = bent(ours), bent(theirs)
    for name in ours.body_names:
        np.testing.assert_allclose(data.body(name).xpos, expected.body(name).xpos, atol=1e-9)
        np.testing.assert_allclose(data.body(name).xmat, expected.body(name).xmat, atol=1e-9)
        np.testing.assert_allclose(model.body(name).mass, other.body(name).mass, atol=1e-9)
        np.testing.assert_allclose(data.body(name).ximat, expected.body(name).ximat, atol=1e-9)
        np.testing.assert_allclose(model.body(name).inertia, other.body(name).inertia, atol=1e-12)
    np.testing.assert_allclose(model.jnt_range, other.jnt_range, atol=1e-12)
